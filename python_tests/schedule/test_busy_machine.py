"""Times that were measured while the machine was busy do not stay.

Calls run on a simulated clock. Curves are tested alone, too.
"""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from helpers.decoding_world import (
    CHAINS,
    MS,
    World,
    always,
    head_cost,
    lookup_cost,
    speed,
    verify,
)

from specdec_ext.schedule.controller import FASTER
from specdec_ext.schedule.costs import (
    FIRST_VALID,
    LAST_VALID,
    WINDOW,
    Curve,
    DraftCosts,
    Elapsed,
    VerifyCosts,
)
from specdec_ext.schedule.memory import MAX_CREDIT, memory_of
from specdec_ext.schedule.options import CHAIN, Source

SEEDS = range(8)


class BusyWorld:
    """A world in which passes and drafts of the first steps may take 5 to 20 times as long.

    Args:
        share: share of these steps that do.
        steps: their number.
    """

    def __init__(self, seed: int, share: float, steps: int):
        self._random, self._share, self._left = random.Random(seed), share, steps
        self.world = World(verify, seed=seed, noise=self._pass)

    def _factor(self) -> float:
        busy = self._left > 0 and self._random.random() < self._share
        return self._random.uniform(5, 20) if busy else self._random.lognormvariate(0, 0.05)

    def _pass(self, rng: random.Random) -> float:
        factor = self._factor()
        self._left -= 1
        return factor

    def speeds(self, seconds, options, calls: int = 14) -> list[float]:
        """The speed of each call relative to plain decoding on an idle machine."""
        drafter = self.world.drafter(
            always(0.85), lambda depth: seconds(depth) * self._factor(), **options
        )
        return [speed(self.world, drafter) for _ in range(calls)]


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        pytest.param(head_cost, CHAINS, id="head"),
        pytest.param(lookup_cost, {"found": 0.6}, id="lookup"),
    ],
)
def test_a_busy_beginning_is_forgotten(seconds, options, share):
    """A hundred busy steps; a few hundred steps later, speed is that of a machine that was never busy."""
    after, slow = [], 0
    for seed in SEEDS:
        idle = fmean(BusyWorld(seed, 0.0, 0).speeds(seconds, options)[6:])
        busy = fmean(BusyWorld(seed, share, 100).speeds(seconds, options)[6:])
        after.append(busy / idle)
        slow += busy < 0.8 * idle
    assert fmean(after) > 0.95 and slow == 0, after


def test_calls_that_sleep_wake_up_when_the_machine_is_faster():
    """The debt of probes that ran beside other processes says nothing about an idle machine."""
    pace = [8.0]
    world = World(lambda rows, nodes: pace[0] * verify(rows, nodes), noise=lambda rng: 1.0)
    drafter = world.drafter(always(0.85), head_cost, **CHAINS)
    memory = memory_of(world.model, drafter)
    world.run(drafter, 128)
    for pace[0] in (8.0, 8.0 / FASTER + 0.1, 1.0):
        memory.credit, memory.sleep.rows, memory.sleep.steps = -9.0, 1, {Source.MODEL: 1000}
        memory.verify.curve(1, 200).add(1, 8 * verify(1, 1), steps=5)
        drafts = len(drafter.asked)
        world.run(drafter, 128)
        assert len(drafter.asked) == drafts  # the call has slept
        assert (memory.credit == MAX_CREDIT) == (pace[0] == 1.0)
        assert (memory.sleep.steps[Source.MODEL] == 0) == (pace[0] == 1.0)
    world.run(drafter, 128)
    assert len(drafter.asked) > drafts


def test_a_call_that_sleeps_and_ends_with_its_first_token():
    world = World(verify)
    drafter = world.drafter(always(0.85), head_cost, **CHAINS)
    world.run(drafter, 128)
    memory = memory_of(world.model, drafter)
    memory.sleep.rows, memory.sleep.steps, credit = 1, {Source.MODEL: 1000}, memory.credit
    assert world.run(drafter, 1).steps == 0
    assert memory.credit == credit and memory.sleep.steps[Source.MODEL] == 1000


def test_one_interrupted_probe_costs_little_credit():
    """The first draft is a probe, and takes as long as a hundred plain steps; later ones do not."""
    world = World(verify, noise=lambda rng: 1.0)
    drafter = world.drafter(
        always(0.85),
        lambda depth: head_cost(depth) + 300 * MS * (len(drafter.asked) == 1),
        **CHAINS,
    )
    memory = memory_of(world.model, drafter)
    memory.experience(1).ledger.balance = -1.0  # there are only plain steps and probes
    stats = world.run(drafter, 16)
    assert stats.probes > 0 and memory.credit > -4.0


# --- curves


def measured(curve: Curve, times: dict[int, float]) -> Curve:
    """The curve with as many times of each size as it keeps, measured in this order."""
    for size, seconds in times.items():
        for _ in range(WINDOW):
            curve.add(size, seconds)
    return curve


@pytest.mark.parametrize(
    ("times", "size", "seconds"),
    [
        pytest.param({1: 9.0, 4: 2.0}, 1, 2.0, id="a narrow pass, then a wider one"),
        pytest.param({4: 9.0, 1: 2.0}, 4, 8.0, id="a wide pass, then single nodes"),
        pytest.param({5: 9.0, 4: 2.0}, 5, 4.0, id="a wide pass, then a narrower one"),
        pytest.param({4: 2.0, 1: 9.0}, 4, 2.0, id="a wide pass, and then a narrow one took longer"),
        pytest.param({1: 1.0, 4: 9.0}, 4, 9.0, id="single nodes, and then a wide pass took longer"),
    ],
)
def test_later_times_of_other_sizes_limit_a_size(times, size, seconds):
    assert measured(Curve(elapsed=Elapsed()), times)(size) == seconds


def test_curves_without_elapsed_time_keep_their_times():
    assert measured(Curve(), {1: 9.0, 4: 2.0})(1) == 9.0


def test_old_times_give_way_to_estimates_and_the_smallest_size_stays():
    elapsed = Elapsed()
    curve = measured(Curve(elapsed=elapsed), {1: 1.0, 2: 1.1, 6: 3.0})
    elapsed.seconds = FIRST_VALID * 3.0 - 1.0
    curve.add(1, 1.0, steps=5)
    curve.add(2, 1.1)
    assert curve(6) == 3.0
    elapsed.seconds += 2.0
    curve.add(1, 1.0, steps=5)
    assert curve(6) == pytest.approx(1.5)  # the line through 1 and 2
    elapsed.seconds *= 100
    measured(curve, {2: 1.0})
    assert curve(1) == 1.0  # an estimate is smaller


def test_new_times_replace_old_ones_and_confirmed_times_are_valid_for_longer():
    elapsed = Elapsed()
    curve = measured(Curve(elapsed=elapsed), {1: 1.0, 6: 5.0})
    valid = FIRST_VALID
    for _ in range(5):
        elapsed.seconds += valid * 5.0 + 1.0
        curve.add(6, 5.0)
        assert curve.count(6) == 1
        measured(curve, {6: 5.0})
        valid = min(2 * valid, LAST_VALID)
    elapsed.seconds += LAST_VALID * 5.0 - 1.0
    curve.add(1, 1.0, steps=5)
    assert curve(6) == 5.0
    measured(curve, {6: 12.0})  # more than twice as long
    elapsed.seconds += FIRST_VALID * 6.0 + 1.0
    curve.add(1, 1.0, steps=5)
    assert curve(6) < 5.0


@pytest.mark.parametrize(("costs", "key"), [(VerifyCosts, 100), (DraftCosts, CHAIN)])
def test_curves_of_all_batches_become_old(costs, key):
    elapsed = Elapsed()
    curves = costs(elapsed)
    for rows in (2, 1):
        curve = curves.curve(rows, key)
        measured(curve, {1: 1.0, 2: 1.1, 6: 5.0})
        elapsed.seconds += FIRST_VALID * 5.0 + 1.0
        curve.add(1, 1.0, steps=5)
        assert curve(6) < 2.0
