"""The controller on a simulated clock is never slower than plain decoding and near the best shape.

Times come from ``decoding_world``, so no result depends on real time. ``test_controller_chaos.py`` tests that
the controller does not change the text.
"""

from __future__ import annotations

import math
import random
import sys
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from helpers.checks.lossless import generate, plain_text
from helpers.command_line import words
from helpers.decoding_world import (
    CHAINS,
    MS,
    World,
    WorldDrafter,
    always,
    head_cost,
    lookup_cost,
    speed,
    verify,
)
from helpers.models.tiny import ScriptedDrafter, generated, oracle_chain, prompts, tiny_model

import specdec_ext
from specdec_ext import DraftModelDrafter, SpeculationConfig, SpeculationStats, TreeConfig
from specdec_ext.report import Report
from specdec_ext.schedule.acceptance import Acceptance, LearntAcceptance, judged
from specdec_ext.schedule.controller import HOPELESS, SHORT_LEVELS, Controller
from specdec_ext.schedule.costs import Curve, VerifyCosts
from specdec_ext.schedule.memory import (
    FIRST_BALANCE,
    MAX_BALANCE,
    MEMORIES,
    Ledger,
    Memory,
    _memories,
    forget,
    memory_of,
)
from specdec_ext.schedule.options import CHAIN, Source, kind_of, name_of
from specdec_ext.schedule.policy import Policy
from specdec_ext.schedule.report import Gain
from specdec_ext.tree.config import LOOKUP, Lookup

# --- never slower


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        pytest.param(head_cost, CHAINS, id="head"),
        pytest.param(lambda depth: 4 * MS, CHAINS, id="slower than the target"),
        pytest.param(lookup_cost, {}, id="lookup"),
    ],
)
def test_wrong_drafts_cost_little(seconds, options, rows):
    world = World(verify, rows)
    drafter = world.drafter(always(0.0), seconds, **options)
    assert speed(world, drafter) > 0.94  # acceptance is not known yet
    assert fmean(speed(world, drafter) for _ in range(4)) > 0.98
    assert speed(world, drafter, policy=Policy(drafter)) < 0.8  # drafting in every step is slower


def test_drafting_ends_when_drafts_turn_wrong_and_begins_when_they_turn_right():
    world = World(verify)
    for asked in (range(200), range(200, 400)):

        def chances(row, at, asked=asked):
            return [0.9 * (at in asked)] * 8

        drafter = world.drafter(chances, head_cost, **CHAINS)
        forget(world.model)
        places = []
        propose = drafter.propose

        def noted(context, places=places, propose=propose):
            places.append(len(context.generated[0]))
            return propose(context)

        drafter.propose = noted
        assert speed(world, drafter, 400) > 1.1
        inside = sum(place in asked for place in places)
        assert inside > 20 and len(places) - inside < inside


def test_the_counted_seconds_are_those_of_the_report():
    """Counters of several calls can be subtracted and divided, as monitoring does."""
    world = World(verify)
    drafter = world.drafter(always(0.8), head_cost, **CHAINS)
    first, second = (world.run(drafter, 128) for _ in range(2))
    for stats in (first, second):
        assert stats.plain_seconds / stats.timed_seconds == pytest.approx(stats.report.gain)
        assert stats.timed_seconds == pytest.approx(stats.seconds["verify"], rel=0.05)
        assert stats.plain_seconds == pytest.approx(127 * verify(1, 1), rel=0.1)
    total = SpeculationStats()
    total.add(first)
    total.add(second)
    assert total.timed_seconds == first.timed_seconds + second.timed_seconds
    assert total.plain_seconds == first.plain_seconds + second.plain_seconds


def test_probes_become_rare():
    world = World(verify)
    drafter = world.drafter(always(0.0), lookup_cost, **CHAINS)
    stats = world.run(drafter, 600)
    assert 4 < stats.probes < 25
    assert stats.shapes["plain"] > 550


def test_probes_become_rare_over_calls():
    """When a draft is right they become frequent again."""
    world = World(verify)
    right = [0.0]
    drafter = world.drafter(lambda row, at: right * 8, head_cost, **CHAINS)
    for _ in range(20):
        world.run(drafter, 128)
    asked = len(drafter.asked)
    for _ in range(20):
        world.run(drafter, 128)
    assert 1 <= len(drafter.asked) - asked <= 4
    right[0] = 0.9
    for _ in range(20):
        world.run(drafter, 128)
    assert speed(world, drafter) > 1.5


def test_call_in_which_no_probe_is_due_runs_as_plain_decoding():
    """Hidden states are recorded and the drafter is started only for a call that may draft."""
    world = World(verify)
    drafter = world.drafter(always(0.0), head_cost, **CHAINS)
    started = []
    drafter.start = lambda *args: started.append(len(drafter.asked))
    for _ in range(20):
        world.run(drafter, 128)
    started.clear()
    asked, calls = len(drafter.asked), 40
    every = [world.run(drafter, 128) for _ in range(calls)]
    assert 1 <= len(drafter.asked) - asked <= len(started) <= calls // 4
    assert {stats.policy for stats in every} == {"auto"}
    assert {stats.drafter for stats in every} == {"WorldDrafter"}
    assert {sum(stats.shapes.values()) for stats in every} == {128 - len(world.texts)}
    assert "no draft was verified" in every[-1].explain()


@pytest.mark.parametrize("rows", [1, 4])
def test_calls_sleep_while_the_credit_does_not_pay_a_probe(rows):
    """Drafts that are often right, but cost more than they save, are started for few calls only."""
    world = World(verify, rows=rows)
    drafter = world.drafter(always(0.8), lambda depth: 4 * MS * depth, **CHAINS)
    started = []
    drafter.start = lambda *args: started.append(len(drafter.asked))
    for _ in range(10):
        world.run(drafter, 128)
    started.clear()
    for _ in range(40):
        world.run(drafter, 128)
    assert 1 <= len(started) <= 20
    assert memory_of(world.model, drafter).misses.get(Source.MODEL, 0) < HOPELESS


class Both(WorldDrafter):
    """Offers lookups, which ``lookup_part`` proposes, and chains."""

    lookup_part = None

    def shapes(self, context):
        return [LOOKUP, *super().shapes(context)]

    def propose(self, context):
        by_lookup = isinstance(context.shape, Lookup)
        return self.lookup_part.propose(context) if by_lookup else super().propose(context)


def test_model_sleeps_while_lookups_pay():
    """The calls between two probes of the model run with the lookups alone."""
    world, started = World(verify), []
    drafter = Both(world, always(0.8), lambda depth: 4 * MS * depth, **CHAINS)
    drafter.lookup_part = world.drafter(always(0.9), lookup_cost)
    drafter.start = lambda *args: started.append("both")
    drafter.lookup_part.start = lambda *args: started.append("lookup")
    for _ in range(40):
        assert speed(world, drafter) > 1.5
    assert started.count("lookup") > 20
    last = len(started) - started[::-1].index("both")
    assert last > 20 and len(drafter.asked) > 4


def test_the_lookup_before_a_draft_of_the_model_counts_once():
    """Lookups find nothing. Chains of 3 are 1.24 times as fast as plain steps, 1.04 with a second lookup."""
    world = World(verify)
    drafter = Both(world, always(0.7), lambda depth: 1.2 * MS + head_cost(depth), **CHAINS)
    drafter.lookup_part = world.drafter(always(0.0), lambda depth: 1.2 * MS, found=0.0)
    assert fmean([speed(world, drafter) for _ in range(30)][10:]) > 1.15


def test_other_number_of_rows_does_not_sleep():
    world = World(verify, rows=4)
    drafter = world.drafter(always(0.0), head_cost, **CHAINS)
    for _ in range(20):
        world.run(drafter, 128)
    drafters = [
        Controller(SpeculationConfig(), drafter, world.model).drafter_of(rows, 1) for rows in (4, 1)
    ]
    assert drafters == [None, drafter]


def test_drafter_that_keeps_outputs_takes_part_in_every_call():
    """Without it, a suffix drafter would miss the outputs of calls that run as plain decoding."""
    world = World(verify)
    drafter = world.drafter(always(0.0), head_cost, **CHAINS)
    for _ in range(20):
        world.run(drafter, 128)
    for drafter.keeps_outputs in (True, False):
        controller = Controller(SpeculationConfig(), drafter, world.model)
        assert controller.drafter_of(1, 1) is (drafter if drafter.keeps_outputs else None)


@pytest.mark.parametrize("rows", [1, 4])
def test_texts_with_good_drafts_do_not_wait_for_credit_after_others(rows):
    """What is known of all rows promises a gain, though the last call's rows had none."""
    world = World(verify, rows=rows)
    chance = [0.0]
    drafter = world.drafter(lambda row, at: chance * 10, lambda depth: 1e-4 * depth, **CHAINS)
    speeds = []
    for call in range(30):
        chance[0] = 0.9 if call % 2 else 0.3
        speeds.append(speed(world, drafter))
    assert min(speeds[5::2]) > 1.3


def test_call_that_may_last_until_the_next_probe_does_not_sleep():
    world = World(verify)
    drafter = world.drafter(always(0.0), head_cost, **CHAINS)
    for _ in range(20):
        world.run(drafter, 128)
    asked = len(drafter.asked)
    world.run(drafter, 2_000)
    assert len(drafter.asked) > asked


def test_drafter_that_pays_does_not_sleep_after_wrong_drafts():
    """Bad luck at the end of a call is no reason: what counts is that drafts are not chosen."""
    world = World(verify)
    drafter = world.drafter(lambda row, at: [0.9 * (at < 240)] * 8, lambda depth: 1e-5, **CHAINS)
    for _ in range(3):
        world.run(drafter, 256)
        asked = len(drafter.asked)
        assert speed(world, drafter, 240) > 1.5
        assert len(drafter.asked) > asked


def test_probes_are_paid_from_a_share_of_the_time():
    world = World(verify, noise=lambda rng: 1.0)
    drafter = world.drafter(always(0.0), lambda depth: 30 * MS, **CHAINS)
    world.run(drafter, 64)  # acceptance is unknown, so there are two or three drafts
    asked = len(drafter.asked)
    seconds = world.run(drafter, 1000).seconds["verify"]
    # The initial credit of one and a half plain steps, and 0.5 % of three seconds.
    assert len(drafter.asked) - asked <= 1 + 0.005 * seconds / (30 * MS)
    asked = len(drafter.asked)
    world.run(drafter, 20_000)
    assert 2 <= len(drafter.asked) - asked <= 1 + 0.005 * 20_000 * 3 / 30
    asked = len(drafter.asked)
    world.run(drafter, 1000, SpeculationConfig(probing=0.0))
    assert len(drafter.asked) == asked


class Hopeful(Controller):
    """Always expects every draft to be right."""

    def __init__(self, *args):
        super().__init__(*args)
        self._acceptance.ahead = lambda row, kind, depth, is_tree=False: [
            *map(float, range(depth + 1))
        ]


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        pytest.param(head_cost, CHAINS, id="head"),
        pytest.param(lookup_cost, {}, id="lookup"),
    ],
)
def test_ledger_limits_the_loss_from_wrong_estimates(seconds, options):
    """With estimates that stay wrong the loss is the initial balance of the ledger, and then only the
    probes."""
    world = World(verify)
    drafter = world.drafter(always(0.1), seconds, **options)

    def call():
        settings = SpeculationConfig(clock=world.clock)
        return speed(world, drafter, policy=Hopeful(settings, drafter, world.model))

    assert call() > 0.87
    assert min(call() for _ in range(4)) > 0.965
    assert memory_of(world.model, drafter).experience(1).ledger.balance <= 2
    assert speed(world, drafter, policy=Policy(drafter)) < 0.8  # drafting in every step is slower


def test_drafts_that_pay_fill_an_empty_ledger():
    world = World(verify)
    good = world.drafter(always(0.9), head_cost, **CHAINS)
    memory = memory_of(world.model, good)
    memory.experience(1).ledger.balance = -2.0
    for _ in range(4):
        world.run(good, 128)
    assert memory.experience(1).ledger.pays
    assert speed(world, good) > 1.5


def test_drafts_of_a_model_must_be_faster_by_a_margin():
    """A step has hidden costs, so two tokens in the time of 1.96 plain steps are not enough."""
    shares = {}
    for name, plain_steps in (("little", 1.96), ("enough", 1.8)):
        world = World(verify, noise=lambda rng: 1.0)
        cost = (plain_steps - 1.12) * verify(1, 1)
        drafter = world.drafter(always(1.0), lambda depth, cost=cost: cost, depths=(1,))
        for _ in range(2):
            stats = world.run(drafter, 400)
        shares[name] = stats.drafts / stats.steps
    assert shares["little"] < 0.1 and shares["enough"] > 0.8


def test_single_step_changes_the_ledger_little():
    """Another process may have interrupted it."""
    ledger = Ledger()
    before = ledger.balance
    ledger.add(-1000.0)
    assert before - ledger.balance == 2
    for _ in range(100):
        ledger.add(5.0)
    assert ledger.balance == MAX_BALANCE  # old gains have a limit


def test_probe_continues_after_the_draft_that_reads_new_tokens():
    """Reading them may be expensive; the next drafts are not."""
    world = World(verify, noise=lambda rng: 1.0)
    drafter = world.drafter(always(0.0), head_cost, depths=(1,))
    world.run(drafter, 64)
    steps = []
    seconds, propose = drafter.seconds, drafter.propose

    def noted(context):
        steps.append(len(context.generated[0]))
        return propose(context)

    def reading(depth):
        return seconds(depth) + 8 * verify(1, 1) * (len(steps) < 2 or steps[-1] - steps[-2] > 20)

    drafter.seconds, drafter.propose = reading, noted
    world.run(drafter, 20_000)
    starts = [n for n, step in enumerate(steps) if n == 0 or step - steps[n - 1] > 20]
    lengths = [end - start for start, end in pairwise([*starts, len(steps)])]
    # A probe ends with the first wrong draft after that one; later probes have no second draft.
    assert lengths[:3] == [2, 2, 2] and lengths[-3:] == [1, 1, 1]
    assert lengths == sorted(lengths, reverse=True)


def test_drafter_of_wrong_drafts_rests_until_shortly_before_a_probe():
    """At rest it does not read the text, so each rest must end before the next draft."""
    world = World(verify)
    drafter = world.drafter(always(0.0), head_cost, depths=(1, 2))
    propose, awake_since = drafter.propose, []

    def noted(context):
        assert not drafter.resting
        if drafter.rests:
            awake_since.append(len(context.generated[0]) - drafter.rests[-1][1])
        return propose(context)

    drafter.propose = noted
    tokens = 20_000
    world.run(drafter, tokens)
    changes = [resting for resting, _ in drafter.rests]
    assert changes == [True, False] * (len(changes) // 2) + [True] * (len(changes) % 2)
    assert min(awake_since) >= 64 and max(awake_since) < 300
    ends = [step for _, step in drafter.rests] + [tokens] * (len(changes) % 2)
    asleep = sum(end - begin for begin, end in zip(ends[::2], ends[1::2], strict=True))
    assert asleep > 0.7 * tokens


def test_drafter_that_is_sometimes_right_does_not_rest():
    world = World(verify)
    drafter = world.drafter(always(0.8), lambda depth: 4 * verify(1, 1), depths=(1, 2))
    stats = world.run(drafter, 5_000)
    assert stats.drafts < 1_000 and not drafter.rests


@pytest.mark.parametrize("slow", [1, 3])
def test_drafts_of_fast_rows_do_not_pay_beside_slow_rows(slow):
    """Such tokens save no pass, as the controller learns from whole calls."""
    world = World(lambda rows, nodes: verify(1, nodes) * (1 + 0.02 * (rows - 1)), rows=4)
    chances = [[0.0 if row < slow else 0.95] * 8 for row in range(4)]
    drafter = world.drafter(lambda row, at: chances[row], lambda depth: 1.2 * MS, **CHAINS)
    for _ in range(6):
        speed(world, drafter)
    assert fmean(speed(world, drafter) for _ in range(6)) > 0.97
    assert speed(world, drafter, policy=Policy(drafter, TreeConfig(depth=3))) < 0.9


def test_first_plain_step_after_a_draft_is_no_reference():
    """It takes longer than other plain steps."""
    last = [1]

    def verify_after(rows, nodes):
        slow = 1.5 if nodes == 1 and last[0] > 1 else 1.0
        last[0] = nodes
        return slow * verify(rows, nodes)

    world = World(verify_after, noise=lambda rng: 1.0)
    drafter = world.drafter(always(0.9), head_cost, **CHAINS)
    stats = world.run(drafter, 2000)
    assert stats.shapes["plain"] > 10
    times = memory_of(world.model, drafter).verify.curve(1, 400)._times[1]
    assert list(times) == pytest.approx([3 * MS] * len(times))


SLOWER = [1.6, 1.5, 1.3, 1.2, 1.1]  # plain steps after a wider pass, relative to others


@pytest.mark.parametrize(
    ("chance", "least"),
    [pytest.param(0.35, 0.98, id="slower"), pytest.param(0.65, 1.1, id="faster")],
)
def test_lookups_are_compared_with_plain_steps_that_no_draft_has_slowed(chance, least):
    """Against the slower plain steps after drafts, both kinds of lookups would pay."""
    for seed in range(3):
        plain_steps = [len(SLOWER)]  # since the last wider pass

        def verify_after(rows, nodes, plain_steps=plain_steps):
            since = plain_steps[0]
            plain_steps[0] = since + 1 if nodes == 1 else 0
            slow = nodes == 1 and since < len(SLOWER)
            return verify(rows, nodes) * (SLOWER[since] if slow else 1.0)

        world = World(verify_after, seed=seed)
        drafter = world.drafter(always(chance), lookup_cost, length=4, found=0.5)
        calls = [world.run(drafter, 128).seconds["verify"] for _ in range(40)]
        assert 127 * verify(1, 1) / fmean(calls[5:]) > least


def test_rare_hits_of_probes_do_not_raise_the_balance():
    """Every fifth draft is good. Probes lose in sum, although some of them gain."""
    balances = []
    for seed in range(8):
        world = World(verify, seed=seed)

        def chances(row, at, world=world):
            return [0.9 * (world.random.random() < 0.2)] * 8

        drafter = world.drafter(chances, head_cost, **CHAINS)
        assert fmean([speed(world, drafter) for _ in range(40)][5:]) > 0.98
        balances.append(memory_of(world.model, drafter).experience(1).ledger.balance)
    assert fmean(balances) < FIRST_BALANCE / 2


def test_drafts_that_pay_stay_in_use_while_the_speed_of_the_machine_changes():
    """Costs that are compared were measured at different speeds."""
    emitted = plain = 0
    for seed in range(8):
        speeds = random.Random(seed)
        paces = [speeds.choice([1.0, 1.3, 1.7, 2.0]) for _ in range(200)]
        worlds = []

        def pace(paces=paces, worlds=worlds):
            return paces[int(worlds[0].clock.now / 0.7)]

        world = World(lambda rows, nodes, pace=pace: pace() * verify(rows, nodes), seed=seed)
        worlds.append(world)
        drafter = world.drafter(
            always(0.7), lambda depth, pace=pace: pace() * head_cost(depth), **CHAINS
        )
        for _ in range(40):
            stats = world.run(drafter, 128)
            emitted, plain = emitted + 127, plain + stats.shapes.get("plain", 0)
    assert plain < 0.15 * emitted  # 0.09; 0.27 if plain steps need not promise more


@pytest.mark.parametrize(
    ("seconds", "options"),
    [pytest.param(head_cost, CHAINS, id="head"), pytest.param(lookup_cost, {}, id="lookup")],
)
def test_large_batches_and_single_rows_do_not_mislead_each_other(seconds, options):
    """A pass over 16 rows takes time for each node, so drafts that pay for one row do not pay there."""

    def limited(rows, nodes):
        return MS * max(3.0, 0.4 * rows * nodes)

    single, first_batch, batches, single_again = [], [], [], []
    for seed in range(8):
        world = World(limited, seed=seed)
        drafter = world.drafter(always(0.7), seconds, **options)
        for speeds, rows in (
            ([], 1),
            (single, 1),
            (first_batch, 16),
            (batches, 16),
            (single_again, 1),
        ):
            world.rows = rows
            speeds.append(speed(world, drafter))
    assert fmean(first_batch) > 0.9  # what single rows have shown about costs is not true there
    assert fmean(batches) > 0.98
    assert fmean(single) > 1.9 and fmean(single_again) > 0.95 * fmean(single)


def test_balance_recovers_soon_from_any_number_of_losses():
    ledger = Ledger()
    for _ in range(100):
        ledger.add(-1.0)
    assert not ledger.pays
    for _ in range(5):
        ledger.add(1.0)
    assert ledger.pays


def test_expensive_first_draft_is_made_only_for_long_texts():
    """The first draft reads the prompt, which pays only for a long text."""
    world = World(verify)
    first = [True]

    def cost(depth):
        cost = head_cost(depth) + (60 * MS if first[0] else 0)
        first[0] = False
        return cost

    drafter = world.drafter(always(0.9), cost, **CHAINS)

    def call(tokens):
        first[0] = True
        return speed(world, drafter, tokens)

    for _ in range(3):
        call(400)
    assert fmean(call(400) for _ in range(3)) > 1.3
    assert fmean(call(16) for _ in range(6)) > 0.9


@pytest.mark.parametrize("seed", range(6))
def test_no_clock_causes_an_error(seed):
    """The clock may stop, jump or start at any time."""
    world = World(lambda rows, nodes: 0.0, rows=3, seed=seed)
    rng = random.Random(seed)
    jumps = [0.0, 0.0, 1e-9, 1e-3, 1.0, 1e9, 1e100]

    class Odd:
        now = rng.choice([0.0, -1e9, 1e12])

        def __call__(self):
            self.now += rng.choice(jumps[: 2 + seed])
            return self.now

    for options in (CHAINS, {}):
        for rest in (True, False):
            drafter = world.drafter(always(rng.random()), lambda depth: 0.0, **options)
            settings = SpeculationConfig(clock=Odd(), may_rest=rest)
            policy = Controller(settings, drafter, world.model)
            stats = world.run(drafter, 100, policy=policy, lengths=[100, 60, 5])
            assert stats.emitted_tokens == 99 + 59 + 4
            assert stats.explain()


# --- near the best


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("chance", [0.7, 0.9])
def test_speed_is_near_that_of_the_best_fixed_shape(chance, rows):
    def mean(policy=lambda drafter: None):
        speeds = []
        for seed in range(8):
            world = World(verify, rows, seed)
            drafter = world.drafter(always(chance), head_cost, **CHAINS)
            speed(world, drafter, policy=policy(drafter))
            speeds += [speed(world, drafter, policy=policy(drafter)) for _ in range(3)]
        return fmean(speeds)

    depth = 3 if chance == 0.7 else 7  # the best fixed shape
    best = mean(lambda drafter: Policy(drafter, TreeConfig(depth=depth)))
    assert mean() > 0.95 * best


def test_depth_follows_costs():
    depths = {}
    for name, slope in (("cheap", 0.01), ("expensive", 0.35)):
        world = World(lambda rows, nodes, slope=slope: 3 * MS * (1 + slope * (nodes - 1)))
        drafter = world.drafter(always(0.85), head_cost, **CHAINS)
        world.run(drafter, 200)
        depths[name] = fmean(drafter.asked[10:])
    assert depths["cheap"] > 5.5 and depths["expensive"] < 3.5


def test_lookups_are_cut_if_nodes_are_expensive():
    world = World(lambda rows, nodes: 3 * MS * (1 + (0.02 if nodes < 5 else 0.9) * (nodes - 1)))
    drafter = world.drafter(always(0.8), lookup_cost, length=8)
    world.run(drafter, 100)
    stats = world.run(drafter, 100)
    assert stats.draft_tokens / stats.drafts == pytest.approx(3, abs=0.4)


def test_changed_costs_are_measured_again():
    """All passes become twice as long."""
    pace = [1.0]
    world = World(lambda rows, nodes: pace[0] * verify(rows, nodes))
    drafter = world.drafter(always(0.9), head_cost, **CHAINS)
    world.run(drafter, 800)
    pace[0] = 2.0
    stats = world.run(drafter, 3000)
    assert stats.shapes["plain"] >= 5
    curve = memory_of(world.model, drafter).verify.curve(1, 2900)
    assert curve(1) == pytest.approx(6 * MS, rel=0.15)


@pytest.mark.parametrize(
    ("cost", "options"), [(head_cost, CHAINS), (lookup_cost, {"length": 8})], ids=["head", "lookup"]
)
def test_drafts_after_a_long_part_of_a_prompt_are_short(cost, options):
    passes, hurried = [], []

    class Hurried(Controller):
        def choose(self, context):
            hurried.append(len(hurried) % 5 == 0)
            if hurried[-1]:
                self.hurry()
            return super().choose(context)

    world = World(lambda rows, nodes: passes.append(nodes) or verify(rows, nodes))
    drafter = world.drafter(always(0.9), cost, **options)
    world.run(drafter, 300)
    passes.clear()
    drafter.asked.clear()
    policy = Hurried(SpeculationConfig(clock=world.clock), drafter, world.model)
    stats = world.run(drafter, 600, policy=policy)
    short = [nodes for nodes, each in zip(passes, hurried, strict=True) if each]
    others = [nodes for nodes, each in zip(passes, hurried, strict=True) if not each]
    assert max(short) == 1 + SHORT_LEVELS
    assert fmean(short) > SHORT_LEVELS  # they are no plain steps either
    if "depths" in options:
        assert drafter.asked.count(SHORT_LEVELS) >= short.count(1 + SHORT_LEVELS)
    assert fmean(others) > 5
    assert stats.drafts == len(passes) - stats.shapes.get("plain", 0)


def test_pinned_drafts_are_not_shortened():
    passes = []
    world = World(lambda rows, nodes: passes.append(nodes) or verify(rows, nodes))
    drafter = world.drafter(always(0.9), head_cost, **CHAINS)
    settings = SpeculationConfig(may_rest=False, shapes=[TreeConfig(depth=4)], clock=world.clock)
    policy = Controller(settings, drafter, world.model)
    original = policy.choose
    policy.choose = lambda context: policy.hurry() or original(context)
    world.run(drafter, 60, policy=policy)
    assert set(passes[:-2]) == {5}  # the last tokens have no room


def test_remaining_rows_keep_their_drafts():
    world = World(verify, rows=3)
    drafter = world.drafter(lambda row, at: [0.95 if row == 2 else 0.0] * 8, head_cost, **CHAINS)
    lengths = [30, 60, 300]
    plain = verify(3, 1) * 29 + verify(2, 1) * 30 + verify(1, 1) * 240
    assert plain / world.run(drafter, 0, lengths=lengths).seconds["verify"] > 1.3


# --- shapes that the caller gives


def test_only_given_shapes_are_drafted():
    world = World(verify)
    drafter = world.drafter(always(0.9), head_cost, **CHAINS)
    settings = SpeculationConfig(shapes=[TreeConfig(depth=2), TreeConfig(depth=4)])
    world.run(drafter, 100, settings)
    assert set(drafter.asked) <= {2, 4}


def test_max_nodes_bounds_drafts_and_passes():
    world = World(verify)
    drafter = world.drafter(always(0.9), head_cost, **CHAINS)
    world.run(drafter, 100, SpeculationConfig(max_nodes=4))
    assert max(drafter.asked) == 3
    drafter = world.drafter(always(0.9), lookup_cost, length=8)
    stats = world.run(drafter, 100, SpeculationConfig(max_nodes=4))
    assert len(stats.proposed_per_position) == 3


def test_without_rest_every_step_drafts():
    world = World(verify)
    drafter = world.drafter(always(0.0), head_cost, **CHAINS)
    stats = world.run(drafter, 60, SpeculationConfig(may_rest=False))
    assert "plain" not in {name for name, count in stats.shapes.items() if count > 1}
    assert stats.drafts >= 57  # the last tokens have no room


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpeculationConfig(shapes=[]), r"shapes is \[\]; expected a list of TreeConfig"),
        (lambda: SpeculationConfig(shapes=[5]), "shapes contains a int; expected TreeConfig"),
        (lambda: SpeculationConfig(max_nodes=1), "max_nodes counts the root and must be at least 2, got 1"),
        (lambda: SpeculationConfig(probing=2), r"probing is a share and must be in \[0, 0.5\], got 2"),
        (lambda: SpeculationConfig(hysteresis=-1), "hysteresis is a share"),
        (lambda: SpeculationConfig(shapes=[TreeConfig(depth=5)], max_nodes=3),
            "max_nodes=3 excludes all of shapes"),
        (lambda: call(speculation="always"), "speculation='always' is not known; expected 'auto'"),
        (lambda: call("ngram", speculation=SpeculationConfig(shapes=[TreeConfig(depth=2)])),
            "NgramDrafter accepts none: .* Leave shapes out"),
        (lambda: call(DraftModelDrafter(tiny_model("llama")),
            speculation=SpeculationConfig(shapes=[TreeConfig(depth=2, top_k=2)], may_rest=False)),
            "drafts only chains, but"),
        (lambda: call(sampler(), speculation=SpeculationConfig(probing=0.02), **REJECTION),
            "one seed would give many texts. Pass speculation='fixed'"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


REJECTION = {"verification": "rejection", "do_sample": True, "seed": 1}


def sampler():
    return DraftModelDrafter(tiny_model("qwen3"), sampled=True)


def call(drafter="ngram", **kwargs):
    ids, mask = prompts((6, 4))
    kwargs = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True) | kwargs
    model = tiny_model("llama")
    return specdec_ext.generate(model, ids, attention_mask=mask, drafter=drafter, **kwargs)


def test_policy_is_fixed_under_rules_whose_text_depends_on_drafts():
    for same in ("auto", SpeculationConfig()):
        stats = call(sampler(), speculation=same, **REJECTION).speculation_stats
        assert (stats.policy, stats.report) == ("fixed", None)
    greedy = call(sampler(), verification="rejection").speculation_stats
    assert greedy.policy == "auto"
    pinned = SpeculationConfig(shapes=[TreeConfig(depth=2)], may_rest=False)
    stats = call(sampler(), speculation=pinned, **REJECTION).speculation_stats
    assert stats.policy == "fixed" and len(stats.proposed_per_position) == 2


# --- on a model, with a real clock


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
def test_text_is_that_of_plain_decoding(decoding):
    text = plain_text("five-ragged", decoding)
    drafter = ScriptedDrafter(generated(text, text.shape[1] - 32), oracle_chain)
    for _ in range(2):
        output = generate(drafter, "five-ragged", decoding)
        assert torch.equal(output.sequences, text)
    stats = output.speculation_stats
    assert stats.policy == "auto" and sum(stats.shapes.values()) <= 31
    assert stats.report is not None and stats.report.verify
    assert stats.explain().startswith("ScriptedDrafter, speculation='auto'")


# --- measurements


def test_proposals_are_compared_with_the_text():
    chain = [5, 1, 2, 3], [-1, 0, 1, 2]
    assert judged(*chain, [1, 2, 3, 9]) == (3, False)
    assert judged(*chain, [1, 2, 9]) == (2, True)
    assert judged(*chain, [9]) == (0, True)
    assert judged(*chain, [1]) == (1, False)  # dropped: the text ended
    assert judged([5], [-1], [1]) == (0, False)
    #     root -> 1 -> 2, root -> 7 -> 8; the last node is inactive
    tree = [5, 1, 7, 2, 8, 0], [-1, 0, 0, 1, 2, -2]
    assert judged(*tree, [7, 8, 4]) == (2, False)
    #     root -> 1 -> 2 -> 3, root -> 7: the text continues behind the short branch
    uneven = [5, 1, 7, 2, 3], [-1, 0, 0, 1, 3]
    assert judged(*uneven, [7, 9]) == (1, True)
    assert judged(*uneven, [7]) == (1, False)  # dropped: unknown
    assert judged(*uneven, [1, 2, 3, 4]) == (3, False)
    assert judged(*tree, [7, 2]) == (1, True)
    assert judged(*tree, [2]) == (0, True)


def test_dropped_proposal_is_judged():
    world = World(lambda rows, nodes: 3 * MS * nodes, noise=lambda rng: 1.0)  # no draft pays
    drafter = world.drafter(always(0.9), lookup_cost, **CHAINS)
    stats = world.run(drafter, 400)
    assert stats.dropped >= 5
    judgements = memory_of(world.model, drafter).acceptance.positions(CHAIN).judged[0]
    assert judgements > stats.drafts


def test_unknown_acceptance_is_that_of_all_rows_and_of_the_position_before():
    learnt = LearntAcceptance()
    call = Acceptance(learnt)
    assert call.ahead(0, CHAIN, 2)[1] == pytest.approx(0.6)
    for _ in range(50):
        call.add(0, CHAIN, 3, False)
        call.add(1, CHAIN, 0, True)
    right, wrong, new = (call.ahead(row, CHAIN, 3) for row in (0, 1, 2))
    assert right[3] > 2.2 and wrong[3] < 0.6
    assert new[1] == pytest.approx(0.5, abs=0.03)
    assert learnt.rates(CHAIN, 5)[3:] == pytest.approx([learnt.rates(CHAIN, 3)[2]] * 2)
    assert call.ahead(0, CHAIN, 3)[:2] == call.ahead(0, CHAIN, 1)[:2]
    # A tree without observations is expected to have more accepted tokens than the chain.
    tree = TreeConfig(depth=2, top_k=4)
    assert learnt.rates(tree, 2, is_tree=True)[0] > learnt.rates(CHAIN, 2)[0]


def test_chains_share_acceptance_and_trees_do_not():
    assert kind_of(TreeConfig(depth=2)) == kind_of(TreeConfig(depth=5)) == CHAIN
    left, right = (TreeConfig(choices=((0,), (1,), path)) for path in ((0, 0), (1, 0)))
    assert name_of(left) == name_of(right) == "tree of 4 nodes, 2 levels"
    assert kind_of(left) != kind_of(right)


def test_curve_interpolates_extrapolates_and_ignores_outliers():
    curve = Curve()
    assert curve(4) is None
    curve.add(1, 1.0)
    assert 1.0 < curve(5) < 1.5
    for seconds in (2.0, 2.1, 50.0):
        curve.add(5, seconds)
    assert curve(5) == 2.1
    assert curve(3) == pytest.approx((1.0 + 2.1) / 2)
    assert curve(9) == pytest.approx(2.1 + 4 * 1.1 / 4)
    curve.add(3, 90.0)  # an outlier: the estimate is smaller
    assert curve(3) == pytest.approx((1.0 + 2.1) / 2)
    for _ in range(20):
        curve.add(1, 1.5)
    assert curve(1) == 1.5 and curve.count(1) == 9


def test_costs_of_other_batches_and_contexts_are_estimated_from_known_ones():
    costs = VerifyCosts()
    for nodes in (1, 4, 8):
        costs.curve(1, 100).add(nodes, 1.0 + 0.1 * nodes)
    assert costs.curve(1, 5000)(4) == pytest.approx(1.4)
    assert costs.curve(4, 100)(1) == pytest.approx(1.4)  # the same number of tokens
    costs.curve(1, 5000).add(1, 2.2)
    assert costs.curve(1, 5000)(4) == pytest.approx(2.8)  # twice the other curve


def test_costs_of_any_number_of_rows_are_estimated():
    """Each curve depends on that of one row more, in a chain longer than Python's recursion limit."""
    costs, rows = VerifyCosts(), 2 * sys.getrecursionlimit()
    costs.curve(rows, 100).add(8, 8.0)
    while rows := rows - 1:
        costs.curve(rows, 100).add(1, 1.0)
    assert costs.curve(1, 100)(8) > 1.0


def test_interval_of_the_gain_contains_the_true_ratio():
    """In about 95 % of 400 random calls."""
    rng, inside = random.Random(0), 0
    for _ in range(400):
        gain = Gain()
        for _ in range(60):
            gain.add(rng.uniform(1.0, 2.0), rng.choice([1.0, 2.0, 3.0]))
        low, high = gain.interval()
        inside += low < 2.0 / 1.5 < high
    assert 0.90 < inside / 400 < 0.99
    assert Gain().interval() == (0.0, math.inf) and Gain().ratio == 1.0


# --- explain()


def test_explain_tells_speed_and_shapes():
    world = World(verify)
    bad = world.drafter(always(0.0), head_cost, **CHAINS)
    world.run(bad, 128)
    text = words(world.run(bad, 128).explain())
    assert "right, which does not pay for" in text
    assert "rows nodes ms times vs 1 node" in text and "1.00x" in text and "chain of 1" in text
    forget(world.model)
    good = world.drafter(always(0.9), head_cost, **CHAINS)
    stats = world.run(good, 400)
    assert stats.report.low < stats.report.gain < stats.report.high
    speed_up = f"{stats.report.gain:.2f}x the estimated speed of plain decoding (95 % interval"
    assert speed_up in words(stats.explain())
    assert sum(stats.shapes.values()) == stats.steps
    assert call(None).speculation_stats.explain() == "Plain decoding without a drafter."
    fixed = call(speculation="fixed").speculation_stats
    assert "drafted in every step (speculation='fixed')" in words(fixed.explain())


def test_memories_of_the_latest_drafters_are_kept():
    class Named(ScriptedDrafter):
        identity = ""

    def memory(name: str) -> Memory:
        drafter.identity = name
        return memory_of(model, drafter)

    model, drafter = tiny_model("llama"), Named([[]], oracle_chain)
    forget(model)
    used_often, used_once = memory("often"), memory("once")
    for number in range(2 * MEMORIES):
        latest = memory(str(number))
        assert memory("often") is used_often and memory(str(number)) is latest
    assert memory("once") is not used_once
    assert len(_memories[model]) == MEMORIES
    forget(model)


@pytest.mark.parametrize(
    "low, high, told", [(0.0, 9.54, False), (1.0, math.inf, False), (0.9, 1.3, True)]
)
def test_uncertain_gain_is_not_reported(low, high, told):
    report = Report([(1, 1, 0.01, 2)], [], [], 1.12, low, high)
    stats = SpeculationStats("x", policy="auto", shapes={"chain of 3": 4}, report=report)
    said = words(stats.explain())
    assert ("1.12x the estimated speed" in said) == told
    too_short = "too short to measure a speed-up: the times of 4 steps and of 2 plain steps for"
    assert (too_short in said) != told


def test_memories_belong_to_a_model_and_a_number_of_threads():
    world = World(verify)
    drafter = world.drafter(always(0.0), head_cost, **CHAINS)
    world.run(drafter, 64)
    assert memory_of(world.model, drafter).experience(1).plain_steps > 0
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert memory_of(world.model, drafter).experience(1).plain_steps == 0
    finally:
        torch.set_num_threads(threads)
    forget(world.model)
    assert memory_of(world.model, drafter).experience(1).plain_steps == 0
