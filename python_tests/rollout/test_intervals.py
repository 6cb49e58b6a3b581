"""Intervals: the statistics are numpy's on what was drawn, prompts stay together, and little data says so."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_ext.evaluate.benchmark.reply import Reply
from specdec_ext.evaluate.benchmark.served import ServedSeries
from specdec_ext.rollout import intervals
from specdec_ext.stats import SpeculationStats


def series(name, requests, stats=True, counts=True):
    """A series from a list of requests per prompt; each is a list of (seconds, tokens) of its chunks."""
    made = ServedSeries(name)
    for place, of_prompt in enumerate(requests):
        made.places.append(place)
        replies = []
        for chunks in of_prompt:
            times = np.cumsum([0.1, *(seconds for seconds, _ in chunks)])
            arrivals = list(zip(times, [1, *(tokens for _, tokens in chunks)], strict=True))
            reply = Reply(0.0, times[-1], arrivals, [1] * len(arrivals), counts, "text")
            reply.tokens = sum(tokens for _, tokens in arrivals)
            if stats:
                accepted = sum(tokens - 1 for _, tokens in chunks)
                reply.stats = SpeculationStats(
                    drafts=len(chunks), draft_tokens=4 * len(chunks), accepted_tokens=accepted
                )
            replies.append(reply)
        made.replies.append(replies)
        made.turns.append(list(range(len(replies))))
        made.seconds.append(replies[0].seconds)
        made.new_tokens.append(replies[0].tokens)
        made.speculation_stats += [reply.stats for reply in replies if reply.stats]
    made.requests = sum(map(len, requests))
    return made


def random_series(name, seed, prompts=12, scale=1.0, **options):
    noise = np.random.default_rng(seed)
    return series(
        name,
        [
            [
                [(scale * noise.uniform(0.01, 0.03), int(noise.integers(1, 4))) for _ in range(20)]
                for _ in range(2)
            ]
            for _ in range(prompts)
        ],
        **options,
    )


@pytest.mark.parametrize("share", [50, 90, 99])
@pytest.mark.parametrize("metric", ["itl", "chunk_gap", "tpot", "ttft"])
def test_percentiles_are_those_of_numpy_on_the_prompts_that_were_drawn(share, metric):
    made = random_series("candidate", 1)
    values, owners = intervals._samples(metric, made)
    assert set(owners) == set(range(24))  # 12 prompts in 2 turns
    statistic = intervals._percentile_of(values, owners, share / 100)
    draws = np.random.default_rng(0).multinomial(24, np.full(24, 1 / 24), size=20)
    for counts, found in zip(draws, statistic(draws), strict=True):
        drawn = [values[owners == cell] for cell in np.repeat(np.arange(24), counts)]
        assert found == pytest.approx(np.percentile(np.concatenate(drawn), share))


def test_a_ratio_of_percentiles_is_that_of_the_whole():
    slow, fast = random_series("candidate", 1, scale=2.0), random_series("baseline", 1)
    found = intervals.percentile("chunk_gap", 90, slow, fast)
    assert [found.value, found.low, found.high] == pytest.approx([2.0] * 3)  # paired: no width
    alone = intervals.percentile("chunk_gap", 90, fast)
    assert alone.low < alone.value < alone.high < 30.1  # milliseconds


def test_one_slow_prompt_widens_the_interval_as_a_whole():
    """Tokens of a request do not count as independent: 20 slow ones of one prompt are one bad draw."""
    requests = [[[(0.01, 1)] * 20] for _ in range(12)]
    requests[3] = [[(0.05, 1)] * 20]
    found = intervals.percentile("itl", 90, series("candidate", requests))
    assert (found.low, found.high) == (pytest.approx(10), pytest.approx(50))


def in_turns(name, paces, prompts=9):
    """A series whose tokens come after so many seconds in each turn."""
    return series(name, [[[(pace, 1)] * 20 for pace in paces] for _ in range(prompts)])


def test_a_slow_turn_widens_the_interval_and_one_that_is_slow_for_both_does_not():
    """Prompts are alike, so that only turns differ: the limits are the slowest and the fastest one."""
    changing, steady = in_turns("candidate", (0.01, 0.02, 0.04)), in_turns("baseline", (0.01,) * 3)
    found = intervals.percentile("itl", 50, changing, steady)
    assert [found.low, found.high] == pytest.approx([1, 4])
    found = intervals.speedup(changing, steady)
    assert [found.low, found.high] == pytest.approx(
        [0.3 / 0.9, 1]
    )  # 0.1 s are before the first token
    both = intervals.percentile("itl", 50, changing, in_turns("baseline", (0.02, 0.04, 0.08)))
    assert [both.low, both.high] == pytest.approx([0.5, 0.5])


def test_a_single_turn_says_nothing_about_others():
    found = intervals.speedup(in_turns("candidate", (0.01,)), in_turns("baseline", (0.02,)))
    assert found.low == pytest.approx(found.high) and found.high == pytest.approx(5 / 3)


def test_turns_in_which_all_requests_failed_are_left_out():
    changing = in_turns("candidate", (0.01, 0.02, 0.04))
    for replies, turns in zip(changing.replies, changing.turns, strict=True):
        del replies[2], turns[2]
    changing.speculation_stats = [reply.stats for replies in changing.replies for reply in replies]
    steady = in_turns("baseline", (0.01,) * 3)
    for found in (
        intervals.speedup(changing, steady),
        intervals.percentile("itl", 50, changing, steady),
        intervals.acceptance(changing, steady),
    ):
        assert 0 < found.low <= found.value <= found.high < 10, found


def test_acceptance_is_the_ratio_of_the_sums():
    made = series("candidate", [[[(0.01, 3)] * 2]] * 11 + [[[(0.01, 1)] * 20]])
    found = intervals.acceptance(made)
    assert found.value == pytest.approx(1 + 2 * 22 / 42)  # not the mean of the prompts' lengths
    assert found.low == pytest.approx(1.0, abs=0.7) and found.high == 3.0
    assert intervals.acceptance(made, made).low == 1.0


def test_the_interval_covers_the_truth():
    """Of 95 % intervals over random prompts, about 95 of 100 contain the number of all prompts."""
    noise = np.random.default_rng(0)
    lengths = noise.integers(1, 5, size=(100, 30))
    inside = 0
    for tokens in lengths:
        made = series("candidate", [[[(0.01, int(each))] * 10] for each in tokens])
        found = intervals.acceptance(made)
        inside += found.low <= 2.5 <= found.high
    assert 90 <= inside <= 99


@pytest.mark.parametrize(
    ("measure", "note"),
    [
        (
            lambda: intervals.speedup(random_series("c", 1, 7), random_series("b", 1, 7)),
            "7 prompts are too few; an interval needs 8",
        ),
        (lambda: intervals.acceptance(random_series("c", 1, 7)), "7 prompts are too few"),
        (
            lambda: intervals.acceptance(random_series("candidate", 1, stats=False)),
            "the candidate tells nothing about its drafts",
        ),
        (
            lambda: intervals.percentile("itl", 99, series("c", [[[(0.01, 1)] * 9]] * 8)),
            "p99 of 72 values is one of the largest",
        ),
        (
            lambda: intervals.percentile("itl", 50, random_series("candidate", 1, counts=False)),
            "the candidate does not tell when each token arrived",
        ),
    ],
)
def test_what_can_not_be_known_says_why(measure, note):
    found = measure()
    assert note in found.note and (found.low, found.high) == (0.0, float("inf"))


def told(name, drafts, accepted):
    """A series of which the server has told the drafts of all requests together."""
    made = random_series(name, 1, stats=False)
    counts = SpeculationStats(drafts=drafts, draft_tokens=4 * drafts, accepted_tokens=accepted)
    made.speculation_stats = [counts]
    return made


def test_counters_of_all_requests_have_no_interval():
    found = intervals.acceptance(told("candidate", 10, 15))
    assert "tells its drafts of all requests only" in found.note and found.high == float("inf")


def test_a_candidate_that_does_not_draft_accepts_nothing():
    found = intervals.acceptance(told("candidate", 0, 0))
    assert (found.value, found.high, found.note) == (1.0, 1.0, "the candidate has not drafted")
    drafting = series("baseline", [[[(0.01, 3)] * 9]] * 12)
    none = series("candidate", [[[(0.01, 1)] * 9]] * 12)
    assert intervals.acceptance(none, drafting).high == pytest.approx(1 / 3)
    none = intervals.acceptance(drafting, told("baseline", 0, 0))
    assert none.note == "the baseline has not drafted" and none.low == 0.0
