"""Verdicts: what each check says, that chance raises no alarm, and that real drops do."""

import math
from dataclasses import replace

import numpy as np
import pytest

from specdec_ext.rollout.lock import ReferenceAcceptance
from specdec_ext.serve import names
from specdec_ext.stats import ALARM_SHARE, ALARM_WINDOW
from specdec_ext.watch.history import Growth
from specdec_ext.watch.judge import Reference, acceptance, judge, worst
from specdec_ext.watch.limits import LIMITS

REFERENCE = Reference((2000, 1600, 1200), (1600, 1200, 840))  # 0.8, 0.75, 0.7


def growth(reached=(), accepted=(), seconds=600.0, **counters) -> Growth:
    by_name = {getattr(names, name.upper()): float(value) for name, value in counters.items()}
    if reached:
        by_name.setdefault(names.DRAFTS, float(reached[0]))
    positions = {
        names.REACHED_PER_POSITION: tuple(map(float, reached)),
        names.ACCEPTED_PER_POSITION: tuple(map(float, accepted)),
    }
    return Growth(seconds, by_name, positions, {})


def verdicts(seen: Growth, reference: Reference | None = REFERENCE):
    return {each.check: each for each in judge(seen, acceptance(seen, reference))}


WELL = dict(timed_seconds=100, plain_seconds=170, generation_tokens=5000)


def test_a_server_that_is_well():
    found = verdicts(growth((3000, 2400, 1800), (2400, 1800, 1260), **WELL))
    assert {name: each.state for name, each in found.items()} == dict.fromkeys(
        ("drafts", "head", "drift", "gain"), "well"
    )
    assert found["gain"].reason == "1.70x the estimated speed of plain decoding"
    assert found["head"].reason == "80.0% of first tokens accepted, of 3,000 drafts"
    assert found["drift"].reason == "3 positions as in the reference"
    assert worst(found.values()) == "well"


@pytest.mark.parametrize(
    ("drafts", "accepted", "state"),
    [
        (ALARM_WINDOW, 0, "critical"),
        (ALARM_WINDOW - 1, 0, "unknown"),
        (1000, math.ceil(1000 * ALARM_SHARE) - 1, "critical"),
        (1000, math.ceil(1000 * ALARM_SHARE), "well"),
    ],
)
def test_a_dead_head_is_one_for_which_generate_warns(drafts, accepted, state):
    found = verdicts(growth((drafts, accepted), (accepted, 0)), None)
    assert found["head"].state == state


def test_a_dead_head_is_found_without_counts_by_position():
    seen = Growth(None, {names.DRAFTS: 500.0, names.ACCEPTED_TOKENS: 3.0}, {}, {})
    assert verdicts(seen)["head"].state == "critical"
    seen = Growth(None, {names.DRAFTS: 500.0, names.ACCEPTED_TOKENS: 300.0}, {}, {})
    assert verdicts(seen)["head"].state == "well"


@pytest.mark.parametrize(
    ("counters", "state", "reason"),
    [
        (dict(drafts=0, generation_tokens=999), "unknown", "0 drafts for 999 tokens"),
        (dict(drafts=0, generation_tokens=1000), "warning", "0 drafts for 1,000 tokens"),
        (dict(generation_tokens=1000), "warning", "was it started without speculation"),
        (dict(drafts=1, generation_tokens=10**6), "well", "1 draft for 1,000,000 tokens"),
    ],
    ids=["few tokens", "no drafts", "no counter", "one draft"],
)
def test_no_drafts(counters, state, reason):
    found = verdicts(growth(**counters))["drafts"]
    assert found.state == state and reason in found.reason


@pytest.mark.parametrize(
    ("plain", "timed", "state"),
    [(12.0, 10.0, "well"), (10.0, 10.0, "warning"), (5.0, 10.0, "warning"), (5.0, 9.9, "unknown")],
)
def test_what_does_not_pay(plain, timed, state):
    found = verdicts(growth(plain_seconds=plain, timed_seconds=timed))["gain"]
    assert found.state == state
    assert found.reason.startswith("speculation does not pay") == (state == "warning")


def test_a_server_without_times_is_not_judged():
    found = verdicts(growth((3000,), (2400,), generation_tokens=5000))["gain"]
    assert found.state == "unknown" and "the server times no steps" in found.reason


# --- drift ------------------------------------------------------------------------------------------


def test_only_the_position_that_dropped_is_named():
    found = verdicts(growth((3000, 2400, 1800), (2400, 960, 1260), **WELL))["drift"]
    assert (found.state, found.reason) == ("warning", "position 2 accepted 40%, not 75%")


def test_a_rise_is_no_drift():
    found = verdicts(growth((3000, 3000, 3000), (3000, 3000, 3000), **WELL))["drift"]
    assert found.state == "well"


def test_shorter_drafts_are_no_drift():
    """A controller that drafts one token has no accepted second one; its first one is as good as before."""
    found = verdicts(growth((3000, 300), (2400, 225), **WELL))["drift"]
    assert (found.state, found.reason) == ("well", "1 position as in the reference")


def test_few_drafts_and_no_reference_are_not_judged():
    assert verdicts(growth((399,), (0,)))["drift"].state == "unknown"
    assert verdicts(growth((400,), (0,)))["drift"].state == "warning"
    assert "pass --lock" in verdicts(growth((3000,), (0,)), None)["drift"].reason


def test_the_worked_example_of_a_drop():
    """Of 800 drafts 400 were accepted and of 1600 in the reference 1200, both divided by 8."""
    (found,) = acceptance(growth((800,), (400,)), Reference((1600,), (1200,)))
    now, then = 51 / 102, 151 / 202
    assert (found.acceptance, found.reference, found.change) == (0.5, 0.75, -0.25)
    assert found.drop == pytest.approx(then - now)
    assert found.error == pytest.approx(math.sqrt(now * (1 - now) / 102 + then * (1 - then) / 202))
    # 0.2475 - 3 * 0.0582 is more than 0.05.
    assert found.drifts(LIMITS)


def drawn(rng, share, drafts, per_text, correlation, size):
    """Accepted drafts of ``size`` windows, whose texts have shares of their own (beta-binomial)."""
    spread = (1 - correlation) / correlation
    texts = drafts // per_text
    shares = rng.beta(share * spread, (1 - share) * spread, (size, texts))
    return rng.binomial(per_text, shares).sum(axis=1)


def alarms(share_then, share_now, drafts, correlation=0.17, seed=0) -> float:
    """Share of windows with an alarm about the first position.

    The texts of 40 drafts with a correlation of 0.17 have the largest design effect that was measured on the
    bundled pair: 1 + 39 * 0.17 = 7.6.
    """
    rng, size = np.random.default_rng(seed), 4000
    then = drawn(rng, share_then, 2000, 40, correlation, size)
    now = drawn(rng, share_now, drafts, 40, correlation, size)
    raised = 0
    for accepted, accepted_then in zip(now, then, strict=True):
        reference = Reference((2000.0,), (float(accepted_then),))
        (found,) = acceptance(growth((drafts,), (accepted,)), reference)
        raised += found.drifts(LIMITS)
    return raised / size


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("drafts", [400, 2000, 20000])
def test_chance_raises_no_alarm(share, drafts):
    assert alarms(share, share, drafts) <= 0.00025  # at most one in 4000


def test_independent_drafts_would_raise_alarms_without_the_design_effect():
    """The simulation is hard enough: without the limits' allowances it raises alarms all the time."""
    rng = np.random.default_rng(0)
    now = drawn(rng, 0.6, 2000, 40, 0.17, 4000) / 2000
    assert np.mean(np.abs(now - 0.6) > 3 * math.sqrt(0.24 / 2000)) > 0.2


@pytest.mark.parametrize("drafts", [2000, 20000])
def test_a_drop_that_is_tolerated_raises_few_alarms(drafts):
    assert alarms(0.7, 0.7 - LIMITS.drift_tolerance, drafts) < 0.01


@pytest.mark.parametrize(("drop", "drafts"), [(0.3, 2000), (0.25, 4000), (0.2, 20000)])
def test_a_real_drop_is_found(drop, drafts):
    assert alarms(0.75, 0.75 - drop, drafts) > 0.9


# --- later positions, with drafts of several lengths ---------------------------------------------------

LENGTHS = (1.0, 1.0, 0.6, 0.6)  # share of the drafts before each position that have a token there
SHARES = (0.8, 0.75, 0.7, 0.7)  # acceptance of each position, given the one before


def counted(rng, shares, drafts, size, lengths=LENGTHS):
    """Drafts that reach each position, and those accepted there: two arrays ``[size, positions]``.

    Texts have 40 drafts and shares of their own, as for :func:`alarms`.
    """
    spread = (1 - 0.17) / 0.17
    left = np.full((size, drafts // 40), 40)
    reached, accepted = [], []
    for share, length in zip(shares, lengths, strict=True):
        left = rng.binomial(left, length)
        reached.append(left.sum(axis=1))
        left = rng.binomial(left, rng.beta(share * spread, (1 - share) * spread, left.shape))
        accepted.append(left.sum(axis=1))
    return np.transpose(reached), np.transpose(accepted)


def late_alarms(shares_now, drafts, shares=SHARES, lengths=LENGTHS, with_counts=True, size=400):
    """For each position, the share of windows with an alarm about it.

    Args:
        shares_now, drafts, lengths: acceptance, number and lengths of the drafts in a window.
        shares: acceptance in the reference, which has 4000 drafts.
        with_counts: whether the lock tells the drafts that reached each position, as those of format 1 don't.
    """
    rng = np.random.default_rng(0)
    then = counted(rng, shares, 4000, size)
    now = counted(rng, shares_now, drafts, size, lengths)
    raised = np.zeros(len(shares))
    for *known, reached, accepted in zip(*then, *now, strict=True):
        known_reached, known_accepted = (tuple(map(int, each)) for each in known)
        lock = ReferenceAcceptance(4000, 16000, known_accepted, 4000, 16000)
        if with_counts:
            lock = replace(lock, reached_per_position=known_reached)
        reference = Reference(lock.reached, lock.accepted_per_position)
        found = acceptance(growth(tuple(reached), tuple(accepted)), reference)
        raised += [each.drifts(LIMITS) for each in found]
    return raised / size


@pytest.mark.parametrize("shares", [SHARES, (0.5,) * 4, (0.9,) * 4], ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1, 1, 1), (1, 0.5, 0.9, 0.3)], ids=str)
def test_chance_raises_no_alarm_at_any_position(shares, lengths):
    """Nor do drafts of other lengths than those of the rollout."""
    raised = late_alarms(shares, 4000, shares, lengths, size=1000)
    assert raised.sum() <= 1 / 1000


@pytest.mark.parametrize("position", [3, 4])
def test_counts_of_reached_positions_find_a_late_drop_sooner(position):
    """With them, 8000 drafts are enough; without them, 40 000 are not."""
    shares = list(SHARES)
    shares[position - 1] -= 0.35
    raised = late_alarms(shares, 8000)
    assert raised[position - 1] > 0.9 and raised.sum() == raised[position - 1]
    assert late_alarms(shares, 40_000, with_counts=False)[position - 1] < 0.1


def test_the_worst_verdict_decides():
    found = verdicts(growth((1000, 0), (0, 0), timed_seconds=20, plain_seconds=10))
    assert worst(found.values()) == "critical"
    assert worst([found["gain"]]) == "warning"
    assert worst([]) == "well"
