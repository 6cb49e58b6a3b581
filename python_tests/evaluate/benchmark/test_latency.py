"""TTFT, TPOT, ITL and chunk gap of events at known times, worked out by hand."""

import pytest
import torch

from specdec_ext.evaluate.benchmark import latency
from specdec_ext.evaluate.benchmark.latency import SAME_CHUNK, Arrivals, Latency, samples, summary

# Sent at 10.0. The first token at 10.5, three in one chunk at 11.1, one at 11.3, two at 11.9.
CHUNKS = [(10.5, 1), (11.1, 3), (11.3, 1), (11.9, 2)]


@pytest.fixture
def now(monkeypatch):
    """The time of the clock, in a list."""
    found = [0.0]
    monkeypatch.setattr(latency.time, "perf_counter", lambda: found[0])
    return found


def test_the_four_metrics_of_a_stream():
    found = Latency.of(10.0, CHUNKS)
    assert found.first == pytest.approx(0.5)
    assert found.per_token == pytest.approx(1.4 / 6)  # seven tokens, six of them after the first
    assert found.between_tokens == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.3, 0.3])
    assert found.gaps == pytest.approx((0.6, 0.2, 0.6))


def test_itl_of_a_stream_that_begins_with_one_token_sums_to_the_time_after_it():
    found = Latency.of(10.0, CHUNKS)
    assert sum(found.between_tokens) == pytest.approx(sum(found.gaps))
    assert found.per_token == pytest.approx(sum(found.between_tokens) / 6)


def test_the_tokens_of_the_first_chunk_have_no_itl():
    found = Latency.of(0.0, [(1.0, 4), (2.0, 2)])
    assert found.between_tokens == [0.5, 0.5]
    assert found.per_token == pytest.approx(1 / 5)  # as vLLM's client computes it


def test_one_token_has_no_time_per_token():
    for arrivals in ([(1.0, 1)], [(1.0, 5)]):
        found = Latency.of(0.0, arrivals)
        assert found.per_token is None and found.between_tokens == [] and found.gaps == ()
    assert summary([found]) == {"ttft": {"p50": 1000, "p90": 1000, "p99": 1000}}
    assert summary([]) == {}


def test_without_the_tokens_of_each_chunk_there_is_no_itl():
    found = Latency(0.5, (0.6, 0.2, 0.6), (), 7)
    assert found.per_token == pytest.approx(1.4 / 6) and found.between_tokens == []
    assert set(summary([found])) == {"ttft", "tpot", "chunk_gap"}


def test_percentiles_are_over_requests_tokens_and_chunks():
    """A second request, of one token, has a share in TTFT alone."""
    both = [Latency.of(10.0, CHUNKS), Latency.of(0.0, [(2.5, 1)])]
    assert {name: len(values) for name, values in samples(both).items()} == {
        "ttft": 2,
        "tpot": 1,
        "itl": 6,
        "chunk_gap": 3,
    }
    found = summary(both)
    assert found["ttft"]["p50"] == pytest.approx(1500)
    assert found["ttft"]["p99"] == pytest.approx(500 + 0.99 * 2000)
    assert found["itl"]["p50"] == pytest.approx(200) and found["itl"]["p90"] == pytest.approx(300)
    assert found["chunk_gap"]["p50"] == pytest.approx(600)


def stream(now, arrivals, times, steps=()):
    """Put a token of two rows at each of these times; a step ends after the tokens of these numbers."""
    arrivals.put(torch.zeros(2, 7, device="cpu"))
    for number, at in enumerate(times):
        now[0] = at
        arrivals.put(torch.zeros(2, device="cpu"))
        if number in steps:
            arrivals.end_step()
    arrivals.end()
    return arrivals.latency()


def test_tokens_within_microseconds_are_one_chunk_if_no_step_is_told(now):
    found = stream(now, Arrivals(9), (1.0, 1.5, 1.50001, 1.50002, 2.5))
    assert (found.first, found.counts, found.tokens) == (1.0, (1, 3, 1), 5)
    assert found.gaps == (0.5, 1.0) and found.per_token == 1.5 / 4
    assert (found.rows, found.prompt_tokens) == (2, 9)


def test_a_chunk_is_a_step_if_steps_are_told(now):
    """Also if the process was interrupted within a step, or if two steps follow within microseconds."""
    late, soon = 1.5 + 100 * SAME_CHUNK, 2.5 + SAME_CHUNK / 10
    found = stream(now, Arrivals(), (1.0, 1.5, late, 2.5, soon), steps=(0, 2, 3, 4))
    assert found.counts == (1, 2, 1, 1)
    assert found.gaps == pytest.approx((0.5, 1.0, SAME_CHUNK / 10))


def test_a_streamer_of_several_tokens_at_once(now):
    """transformers' assisted decoding puts all tokens of a step at once."""
    arrivals = Arrivals()
    arrivals.put(torch.zeros(1, 7, device="cpu"))
    for at, count in ((1.0, 1), (2.0, 4)):
        now[0] = at
        arrivals.put(torch.zeros(count, device="cpu"))
    assert arrivals.latency().counts == (1, 4)
