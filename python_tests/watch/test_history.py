"""Differences of counters: rates, quantiles, the time span, and servers that are started again."""

import math

import pytest

from specdec_ext.serve import names
from specdec_ext.watch.history import Growth, History
from specdec_ext.watch.snapshot import Snapshot


def snapshot(at: float, tokens: float = 0, **more) -> Snapshot:
    return Snapshot(at, "m", {names.GENERATION_TOKENS: tokens}, **more)


def test_a_growth_is_the_difference():
    first = Snapshot(
        10.0,
        "m",
        {
            names.GENERATION_TOKENS: 100,
            names.DRAFTS: 20,
            names.ACCEPTED_TOKENS: 30,
            names.STEPS: 40,
            names.STEP_TOKENS: 80,
            names.TIMED_SECONDS: 2.0,
            names.PLAIN_SECONDS: 3.0,
        },
        {names.ACCEPTED_PER_POSITION: (18, 12), names.REACHED_PER_POSITION: (20, 17)},
    )
    second = Snapshot(
        14.0,
        "m",
        {
            names.GENERATION_TOKENS: 300,
            names.DRAFTS: 70,
            names.ACCEPTED_TOKENS: 130,
            names.STEPS: 100,
            names.STEP_TOKENS: 260,
            names.TIMED_SECONDS: 4.0,
            names.PLAIN_SECONDS: 6.5,
        },
        {names.ACCEPTED_PER_POSITION: (58, 42, 30), names.REACHED_PER_POSITION: (70, 56, 41)},
    )
    growth = Growth.between(first, second)
    assert growth.seconds == 4 and growth.tokens_per_second == 50
    assert growth.count(names.DRAFTS) == 50
    assert growth.acceptance_length == 3.0  # 1 + 100 / 50
    assert growth.tokens_per_step == 3.0
    assert growth.gain == 1.75
    assert growth.accepted == (40, 30, 30) and growth.reached == (50, 39, 41)


def test_without_counts_of_reached_positions_all_drafts_have_the_same_length():
    """vLLM: all drafts reach the first position, those accepted there reach the second, and so on."""
    growth = Growth(1.0, {names.DRAFTS: 50.0}, {names.ACCEPTED_PER_POSITION: (40.0, 30.0, 6.0)}, {})
    assert growth.reached == (50, 40, 30)


def test_nothing_is_divided_by_zero():
    growth = Growth.between(snapshot(1.0, 5), snapshot(1.0, 5))
    assert growth.tokens_per_second is growth.acceptance_length is growth.gain is None
    assert growth.tokens_per_step is growth.quantile(names.TIME_TO_FIRST_TOKEN, 0.5) is None


def test_since_the_beginning_there_is_no_rate():
    growth = Growth.between(None, snapshot(99.0, 5))
    assert growth.seconds is growth.tokens_per_second is None
    assert growth.count(names.GENERATION_TOKENS) == 5


@pytest.mark.parametrize(
    ("share", "seconds"),
    [(0.25, 0.05), (0.5, 0.1), (0.625, 0.2), (0.75, 0.3), (0.9, 0.3), (1.0, 0.3)],
)
def test_quantiles_are_interpolated_in_their_bucket(share, seconds):
    """Of 8 values, 4 are up to 0.1, 2 more up to 0.3, none up to 0.5, and 2 above that."""
    counts = {0.1: 4.0, 0.3: 6.0, 0.5: 6.0, math.inf: 8.0}
    growth = Growth(None, {}, {}, {names.INTER_TOKEN_LATENCY: counts})
    expected = 0.5 if share > 0.75 else seconds  # the last finite bound for those above it
    assert growth.quantile(names.INTER_TOKEN_LATENCY, share) == pytest.approx(expected)


def test_the_span_is_at_least_as_long_as_asked():
    history = History(10.0)
    assert history.growth is history.recent is None
    for at in range(0, 31, 4):
        history.add(snapshot(at, 100 * at))
    assert (history.growth.seconds, history.recent.seconds) == (12, 4)  # 16 to 28
    assert history.growth.tokens_per_second == 100


def test_a_restart_gives_no_negative_rates():
    history = History(60.0)
    for at, tokens in ((0, 1000), (5, 2000), (10, 30), (15, 130)):
        history.add(snapshot(at, tokens))
        growth = history.growth
        assert growth is None or growth.tokens_per_second >= 0
    assert history.restarts == 1
    assert (history.growth.seconds, history.growth.tokens_per_second) == (5, 20)
