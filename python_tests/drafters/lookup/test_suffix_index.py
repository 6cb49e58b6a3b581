"""Compiled suffix decoding (`propose_suffix`, `SuffixIndex`, `SuffixHistory`) against its specification.

Claims: drafts equal `specdec_ext.reference.suffix.propose` exactly, for text in any chunks, after merges of
runs and evictions; batches equal single calls; memory and time are bounded on hostile text; a history may be
read while it is written; bad arguments are named and change nothing.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import numpy as np
import pytest
from bench import suffix as bench_suffix
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_ext._host import SuffixHistory, SuffixIndex, propose_suffix

from specdec_ext.reference import suffix
from specdec_ext.reference.suffix import Draft, Rule


def array(tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def index_of(text) -> SuffixIndex:
    index = SuffixIndex()
    index.append(array(text))
    return index


def history_of(outputs, max_tokens: int = 1 << 20) -> SuffixHistory:
    history = SuffixHistory(max_tokens)
    for output in outputs:
        history.add(array(output), [len(output)])
    return history


def outputs_of(history: SuffixHistory) -> list[list[int]]:
    tokens, counts = history.outputs()
    parts = np.split(tokens, np.cumsum(counts)[:-1]) if len(counts) else []
    return [part.tolist() for part in parts]


def draft(request: SuffixIndex, history: SuffixHistory | None, rule: Rule) -> Draft:
    tokens, parents, matches, scores = propose_suffix([request], history, **asdict(rule))
    assert tokens.dtype == parents.dtype == matches.dtype == np.int64
    assert parents[0, 0] == -1
    return Draft(tokens[0, 1:].tolist(), parents[0, 1:].tolist(), int(matches[0]), float(scores[0]))


RULES = st.builds(
    Rule,
    num_draft_tokens=st.integers(1, 12),
    max_match=st.integers(1, 8),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]),
    offset=st.sampled_from([-1.5, 0.0, 1.0, 3.0]),
    min_probability=st.sampled_from([0.01, 0.1, 1 / 3, 0.5, 1.0]),
    tree=st.booleans(),
)


@st.composite
def texts(draw, max_size: int = 60):
    """Texts of few tokens repeat strings."""
    return draw(st.lists(st.integers(0, draw(st.integers(0, 4))), min_size=1, max_size=max_size))


# ---------------------------------------------------------------- equals the reference


@settings(max_examples=200, deadline=None)
@given(texts(), st.lists(texts(), max_size=4), RULES)
def test_equals_reference(request_text, outputs, rule):
    expected = suffix.propose(request_text, outputs, rule)
    assert draft(index_of(request_text), history_of(outputs), rule) == expected


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), RULES, st.data())
def test_growing_text_equals_reference(seed, rule, data):
    """The text has several runs, which are merged."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, data.draw(st.integers(1, 4)), 500).tolist()
    index = SuffixIndex()
    while len(index) < len(text):
        size = data.draw(st.integers(1, 150))
        index.append(array(text[len(index) : len(index) + size]))
        assert draft(index, None, rule) == suffix.propose(text[: len(index)], [], rule)


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "path"])
def test_many_outputs_equal_reference(tree):
    rng = np.random.default_rng(0)
    outputs = [rng.integers(0, 3, rng.integers(1, 40)).tolist() for _ in range(60)]
    history = SuffixHistory(10_000)
    for count, output in enumerate(outputs, start=1):
        history.add(array(output), [len(output)])
        if count % 12 == 0:
            rule = Rule(10, 8, 2.0, 1.0, 0.05, tree)
            request = rng.integers(0, 3, 9).tolist()
            expected = suffix.propose(request, outputs[:count], rule)
            assert draft(index_of(request), history, rule) == expected


def test_long_text_of_few_tokens_equals_reference():
    """Likely tokens are found by sampling thousands of occurrences."""
    rng = np.random.default_rng(1)
    text = np.minimum(rng.geometric(0.4, 3000), 30).tolist()
    for min_probability in (0.01, 0.1, 0.3):
        rule = Rule(10, 3, 2.0, 2.0, min_probability)
        assert draft(index_of(text), None, rule) == suffix.propose(text, [], rule)


@pytest.mark.parametrize("repeats", [suffix.MAX_TIED, suffix.MAX_TIED + 1])
def test_ties_go_to_the_latest_up_to_a_limit(repeats):
    """5 and 4 follow 9 equally often, and 4 is later; up to MAX_TIED occurrences are considered."""
    text = [9, 5, 9, 4] * repeats + [9]
    rule = Rule(1, 1)
    assert SuffixIndex.MAX_TIED == suffix.MAX_TIED and SuffixIndex.DEPTH == suffix.DEPTH
    assert draft(index_of(text), None, rule).tokens == [4]
    text = [9, 4, 9, 5] * repeats + [9]
    expected = suffix.propose(text, [], rule)
    assert draft(index_of(text), None, rule) == expected
    assert expected.tokens == ([5] if repeats == suffix.MAX_TIED else [4])


def test_matches_end_at_the_sorted_depth():
    text = list(range(200)) + list(range(40))
    rule = Rule(60, 32, 4.0)
    found = draft(index_of(text), None, rule)
    assert found == suffix.propose(text, [], rule)
    assert found.tokens == list(range(40, 40 + suffix.DEPTH - 32))


# ---------------------------------------------------------------- worked examples

# request, outputs, rule, tokens, parents, match length, score
WORKED_EXAMPLES = {
    "nothing repeats": ([1, 2, 3], [[4, 5]], Rule(4, 4), [], [], 0, 0.0),
    "the request's own end is no occurrence": ([1, 2], [], Rule(4, 4), [], [], 0, 0.0),
    # 1 2 -> 3 once, budget 2
    "a path": ([1, 2, 3, 4, 1, 2], [], Rule(4, 4, tree=False), [3, 4], [0, 1], 2, 2.0),
    # 9 is followed by 1, 1, 2: the tree spends its second node on 2, the path on what follows 1.
    "a tree": ([9, 1, 9, 1, 9, 2, 9], [], Rule(2, 1, 2.0), [1, 9], [0, 1], 1, 2 / 3 + 2 / 3),
    # Three candidates of 1/3 after node 1: 2 was found with it, then 6 (later) and 5 below it.
    "siblings": ([9, 1, 5, 9, 1, 6, 9, 2, 9], [], Rule(4, 1, 4.0), [1, 2, 6, 5], [0, 0, 1, 1], 1,
        2 / 3 + 1 / 3 + 1 / 3 + 1 / 3),
    "unlikely tokens are left out": ([9, 1, 5, 9, 1, 6, 9, 2, 9], [], Rule(4, 1, 4.0, min_probability=0.6),
        [1], [0], 1, 2 / 3),
    # In the request 3 is followed by 7; in past outputs 2 3 is followed by 4 5, which scores 2.
    "past outputs": ([3, 7, 2, 3], [[1, 2, 3, 4, 5]], Rule(4, 4), [4, 5], [0, 1], 2, 2.0),
    "the request wins a tie": ([3, 7, 3], [[3, 8]], Rule(4, 4), [7], [0], 1, 1.0),
    "outputs are not joined": ([1, 2], [[8, 1], [2, 3, 8]], Rule(4, 4), [3], [0], 1, 1.0),
    "no budget": ([1, 2, 1], [], Rule(4, 4, 0.5), [], [], 0, 0.0),
    "offset": ([1, 2, 3, 1], [], Rule(4, 4, 0.0, 2.0), [2, 3], [0, 1], 1, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("case", WORKED_EXAMPLES.values(), ids=WORKED_EXAMPLES.keys())
def test_worked_example(case):
    request, outputs, rule, *expected = case
    expected = Draft(*expected)
    assert suffix.propose(request, outputs, rule) == expected
    assert draft(index_of(request), history_of(outputs), rule) == expected


def test_rows_of_a_batch_are_padded_with_inactive_nodes():
    requests = [index_of(text) for text in ([1, 2, 3, 1, 2], [7], [4, 4])]
    rule = asdict(Rule(3, 4, 2.0))
    tokens, parents, matches, scores = propose_suffix(requests, None, **rule)
    np.testing.assert_array_equal(tokens, [[2, 3, 1, 2], [7, 0, 0, 0], [4, 4, 0, 0]])
    np.testing.assert_array_equal(parents, [[-1, 0, 1, 2], [-1, -2, -2, -2], [-1, 0, -2, -2]])
    assert (matches.tolist(), scores.tolist()) == ([2, 0, 1], [3.0, 0.0, 1.0])
    assert [each.shape for each in propose_suffix([], None, **rule)] == [(0, 1), (0, 1), (0,), (0,)]


# ---------------------------------------------------------------- the history


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.lists(texts(30), max_size=12), texts(12), RULES)
def test_history_keeps_the_latest_outputs(max_tokens, outputs, request_text, rule):
    history = history_of(outputs, max_tokens)
    kept = outputs_of(history)
    assert history.num_tokens + len(history) <= max_tokens and len(kept) == len(history)
    trimmed = [output[-(max_tokens - 1) :] for output in outputs]
    assert kept == trimmed[len(trimmed) - len(kept) :]
    if outputs:
        assert kept, "the last output always fits"
    assert draft(index_of(request_text), history, rule) == suffix.propose(request_text, kept, rule)


def test_many_outputs_at_once_equal_one_by_one():
    outputs = [[1, 2, 3], [], [4], [1, 2, 5, 6]]
    history = SuffixHistory(100)
    history.add(array([token for output in outputs for token in output]), [3, 0, 1, 4])
    assert outputs_of(history) == [[1, 2, 3], [4], [1, 2, 5, 6]]
    assert (len(history), history.num_tokens, history.largest_token) == (3, 8, 6)
    assert draft(index_of([2]), history, Rule(4, 4)).tokens == [5]


def test_readers_see_whole_outputs_while_a_thread_writes():
    """The history has room for one output, which each new one replaces. In all of them 3 follows 1 2."""
    rng = np.random.default_rng(4)
    noise = [np.append(rng.integers(4, 50, 5000), [1, 2, 3]) for _ in range(8)]
    history = history_of(noise, 6_000)
    stop = threading.Event()
    found = set()

    def read():
        requests = [index_of([1, 2])] * 20
        while not stop.is_set():
            found.update(propose_suffix(requests, history, **asdict(Rule(1, 2)))[0][:, -1].tolist())

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(200):
        history.add(noise[i % 8], [5003])
    stop.set()
    for thread in threads:
        thread.join()
    assert found == {3}


# ---------------------------------------------------------------- time and memory

HOSTILE_TEXTS = {
    "one token": lambda n: np.full(n, 7),
    "period 2": lambda n: np.arange(n) % 2,
    "all different": lambda n: np.arange(n),
    "random bits": lambda n: np.random.default_rng(2).integers(0, 2, n),
    "one token and others": lambda n: np.where(np.arange(n) % 2, np.arange(n), 0),
}


@pytest.mark.parametrize("make", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS.keys())
def test_time_and_memory_are_bounded_on_hostile_text(make):
    text = make(100_000).astype(np.int64)
    start = time.perf_counter()
    request = SuffixIndex()
    for chunk in np.array_split(text, 1000):
        request.append(chunk)
    history = SuffixHistory(100_000)
    for chunk in np.array_split(text, 500):
        history.add(chunk, [len(chunk)])
    for _ in range(200):
        propose_suffix([request], history, **asdict(Rule(16, 24, 1.0)))
    assert time.perf_counter() - start < 10
    assert request.nbytes <= 10 * len(text) + 4096
    assert history.nbytes <= 10 * history.max_tokens + 4096
    assert request.num_runs <= 12


def test_nbytes_is_bounded_while_outputs_are_replaced():
    history = SuffixHistory(5000)
    rng = np.random.default_rng(3)
    for _ in range(300):
        output = rng.integers(0, 1000, rng.integers(1, 300))
        history.add(output, [len(output)])
        assert history.num_tokens + len(history) <= 5000
        assert history.nbytes <= 10 * 5000 + 8 * len(history) + 4096
    assert history.num_tokens > 5000 * 3 // 4 - 300


def test_benchmark_prints_and_writes_its_table(capsys, tmp_path):
    bench_suffix.main(
        ["--tokens", "20000", "--vocabulary", "300", "--out", str(tmp_path / "suffix")]
    )
    assert "us per drafted token" in capsys.readouterr().out
    rows = json.loads((tmp_path / "suffix.json").read_text())["rows"]
    assert [row["draft"] for row in rows] == ["path", "tree"]
    assert all((row["history_tokens"], row["outputs"]) == (19_500, 39) for row in rows)
    assert all(0 < row["accepted"] < 1 for row in rows)


# ---------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_draft_tokens": 0}, r"num_draft_tokens must be in \[1, 4096\], got 0"),
        ({"max_match": 64}, r"max_match must be in \[1, 63\], got 64"),
        ({"factor": -1.0}, "factor must be a number that is not negative, got -1"),
        ({"factor": float("nan")}, "factor must be .*, got -?nan"),
        ({"offset": float("inf")}, "offset must be a number, got inf"),
        ({"min_probability": 0.0}, r"min_probability must be in \[0.01, 1\]"),
        ({"min_probability": float("nan")}, "min_probability must be .*, got -?nan"),
    ],
)
def test_rejects_rules(change, message):
    rule = asdict(Rule(4, 4)) | change
    with pytest.raises(ValueError, match=message):
        propose_suffix([index_of([1])], None, **rule)


def test_rejects_rows_without_root():
    rule = asdict(Rule(4, 4))
    with pytest.raises(ValueError, match=r"requests\[1\] is empty.*append the prompt"):
        propose_suffix([index_of([1]), SuffixIndex()], None, **rule)
    with pytest.raises(TypeError, match=r"requests\[0\] must be a SuffixIndex, got None"):
        propose_suffix([None], None, **rule)


def test_rejected_tokens_change_nothing():
    index, history = index_of([1, 2]), history_of([[1, 2]])
    for bad in (array([3, -1]), array([2**31])):
        with pytest.raises(ValueError, match="token ids must be in"):
            index.append(bad)
        with pytest.raises(ValueError, match="token ids must be in"):
            history.add(bad, [len(bad)])
    with pytest.raises(TypeError, match="got dtype int32"):
        index.append(np.zeros(2, np.int32))
    assert len(index) == 2 and outputs_of(history) == [[1, 2]]


@pytest.mark.parametrize("counts", [[1], [3], [-1, 3], [2, 1], [2**62, 2**62]])
def test_rejects_counts(counts):
    with pytest.raises(ValueError, match="add up to"):
        SuffixHistory(10).add(array([1, 2]), counts)


@pytest.mark.parametrize("max_tokens", [1, 0, -5, 2**30 + 1])
def test_rejects_sizes(max_tokens):
    message = rf"max_tokens must be in \[2, 1073741824\], got {max_tokens}"
    with pytest.raises(ValueError, match=message):
        SuffixHistory(max_tokens)
