"""The compiled `NgramIndex` against its Python specification.

Claims: drafts equal `specdec_ext.reference.ngram.propose` exactly, for text in any chunks and any hash;
batches equal single calls; time per token and per proposal is bounded on hostile text; memory stays below the
documented bound; bad arguments are named and change nothing.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_ext._host import NgramIndex

from specdec_ext.reference import ngram

ALL_COLLIDE = 0
SIXTEEN_HASHES = 1 << 60  # only the low four bits of the last token determine the slot
GOOD_HASH = 0x9E3779B97F4A7C15


def index_of(text, min_ngram, max_ngram, **options) -> NgramIndex:
    index = NgramIndex(min_ngram, max_ngram, **options)
    index.extend(np.array(text, dtype=np.int64))
    return index


def draft(index: NgramIndex, num_tokens: int, num_branches: int) -> tuple[list[int], list[int]]:
    tokens, parents = index.propose(num_tokens, num_branches)
    assert tokens.dtype == parents.dtype == np.int64
    return tokens.tolist(), parents.tolist()


@st.composite
def drafting_cases(draw):
    """Texts of few tokens repeat n-grams; some n-grams are longer than the text."""
    text = draw(st.lists(st.integers(0, draw(st.integers(0, 4))), max_size=80))
    min_ngram = draw(st.integers(1, 4))
    max_ngram = min_ngram + draw(st.integers(0, 5))
    return text, min_ngram, max_ngram, draw(st.integers(0, 24)), draw(st.integers(1, 8))


# ---------------------------------------------------------------- equals the reference


@settings(max_examples=500, deadline=None)
@given(drafting_cases(), st.sampled_from([GOOD_HASH, SIXTEEN_HASHES, ALL_COLLIDE]), st.data())
def test_equals_reference_after_every_chunk(case, hash_multiplier, data):
    text, min_ngram, max_ngram, num_tokens, num_branches = case
    index = NgramIndex(min_ngram, max_ngram, hash_multiplier=hash_multiplier)
    while len(index) < len(text):
        size = data.draw(st.integers(1, len(text) - len(index)))
        index.extend(np.array(text[len(index) : len(index) + size], dtype=np.int64))
        expected = ngram.propose(text[: len(index)], min_ngram, max_ngram, num_tokens, num_branches)
        assert draft(index, num_tokens, num_branches) == expected


def test_only_the_latest_occurrences_are_considered():
    """The first occurrence of token 9 has another continuation; it is the 64th or 65th latest one."""
    assert NgramIndex.MAX_OCCURRENCES == ngram.MAX_OCCURRENCES == 64
    for num_boring, expected_branches in ((63, 2), (64, 1)):
        text = [9, 5, *[9, 1] * num_boring, 9]
        tokens, parents = draft(index_of(text, 1, 1), 6, 4)
        assert (tokens, parents) == ngram.propose(text, 1, 1, 6, 4)
        assert parents.count(0) == expected_branches


def test_occurrence_counts_once():
    """If 39 occurrences of (1 9) also counted as occurrences of (9), they would fill the limit of 64 before
    (2 9), which has another continuation."""
    text = [2, 9, 5, *[1, 9] * 40]
    tokens, parents = draft(index_of(text, 1, 2), 6, 4)
    assert (tokens, parents) == ngram.propose(text, 1, 2, 6, 4)
    assert (tokens, parents) == ([1, 9, 1, 5, 1, 9], [0, 1, 2, 0, 4, 3])


# ---------------------------------------------------------------- worked examples

WORKED_EXAMPLES = {
    # text, (min_ngram, max_ngram), (num_tokens, num_branches), tokens, parents
    "empty text": ([], (1, 2), (4, 2), [], []),
    "one token": ([5], (1, 2), (4, 2), [], []),
    "nothing repeats": ([1, 2, 3, 4], (1, 3), (4, 2), [], []),
    "match shorter than min_ngram": ([1, 2, 3, 2], (2, 3), (4, 1), [], []),
    "no tokens wanted": ([1, 1, 1], (1, 2), (0, 2), [], []),
    "copy": ([1, 2, 3, 4, 5, 1, 2], (2, 2), (3, 1), [3, 4, 5], [0, 1, 2]),
    "copy continues into its own draft": ([1, 2, 3, 1, 2], (1, 2), (7, 1), [3, 1, 2, 3, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 6]),
    "occurrences may overlap": ([4, 4], (1, 2), (3, 1), [4, 4, 4], [0, 1, 2]),
    "longest match wins over a later one": ([1, 2, 3, 8, 2, 9, 1, 2], (1, 2), (2, 1), [3, 8], [0, 1]),
    "most recent match wins": ([1, 2, 1, 3, 1], (1, 1), (1, 1), [3], [0]),
    # The example of ngram_index.h: 6 9 5 from position 4, 6 7 from position 0, then one more node.
    "two branches share a prefix": ([5, 6, 7, 8, 5, 6, 9, 5], (1, 2), (5, 2), [6, 9, 5, 7, 6],
        [0, 1, 2, 1, 3]),
    # The match at position 3 has two tokens (3 1); those at 5 and 0 have one (1), the latest first.
    "shorter matches make further branches": ([1, 4, 3, 1, 5, 1, 6, 3, 1], (1, 2), (8, 3),
        [5, 1, 6, 3, 6, 3, 4, 1], [0, 1, 2, 3, 0, 5, 0, 4]),
    # One node is free at a time: the first branch takes it.
    "one node": ([1, 4, 1, 5, 1], (1, 1), (1, 4), [5], [0]),
    # All continuations are equal, so one branch has all nodes.
    "equal continuations are one branch": ([7] * 9, (1, 2), (5, 3), [7] * 5, [0, 1, 2, 3, 4]),
}  # fmt: skip


@pytest.mark.parametrize("case", WORKED_EXAMPLES.values(), ids=WORKED_EXAMPLES.keys())
def test_worked_example(case):
    text, (min_ngram, max_ngram), (num_tokens, num_branches), tokens, parents = case
    assert ngram.propose(text, min_ngram, max_ngram, num_tokens, num_branches) == (tokens, parents)
    index = index_of(text, min_ngram, max_ngram)
    assert draft(index, num_tokens, num_branches) == (tokens, parents)


@settings(deadline=None)
@given(drafting_cases())
def test_match_length_is_that_of_the_longest_match(case):
    text, min_ngram, max_ngram, _, _ = case
    lengths = range(min_ngram, max_ngram + 1)
    matching = [n for n in lengths if ngram.find_occurrences(text, n, n)]
    assert index_of(text, min_ngram, max_ngram).match_length() == max(matching, default=0)


# ---------------------------------------------------------------- invariants


# ---------------------------------------------------------------- arrays and batches


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::2],
        lambda a: a[::-1],
        lambda a: np.broadcast_to(a[3:4], (7,)),
        lambda a: a[:0],
        lambda a: np.stack([a, a + 1], axis=1)[:, 1],
        lambda a: np.frombuffer(b"." + a.tobytes(), dtype=np.int64, offset=1),
    ],
    ids=["every second", "reversed", "stride 0", "empty", "column", "unaligned"],
)
def test_text_may_have_any_memory_layout(view):
    array = view(np.arange(20) % 7)
    index = NgramIndex(1, 3)
    index.extend(array)
    assert len(index) == len(array)
    assert draft(index, 5, 2) == ngram.propose(array.tolist(), 1, 3, 5, 2)


def test_rows_of_a_batch_are_padded_with_inactive_nodes():
    indexes = [index_of(text, 1, 2) for text in ([5, 6, 7, 8, 5, 6, 9, 5], [1, 2], [4, 4])]
    tokens, parents = NgramIndex.propose_batch(indexes, 5, 2)
    assert tokens.dtype == parents.dtype == np.int64
    assert tokens.tolist() == [[5, 6, 9, 5, 7, 6], [2, 0, 0, 0, 0, 0], [4, 4, 4, 4, 4, 4]]
    assert parents.tolist() == [[-1, 0, 1, 2, 1, 3], [-1, -2, -2, -2, -2, -2], [-1, 0, 1, 2, 3, 4]]


def test_batch_may_be_empty_or_have_only_roots():
    tokens, parents = NgramIndex.propose_batch([], 3, 1)
    assert tokens.shape == parents.shape == (0, 4)
    NgramIndex.extend_batch([], np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.int64))
    tokens, parents = NgramIndex.propose_batch([index_of([8, 8], 1, 1)], 0, 1)
    assert (tokens.tolist(), parents.tolist()) == ([[8]], [[-1]])


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=5), st.booleans())
def test_batch_equals_single_rows(texts, transposed):
    width = max(map(len, texts), default=1)
    padded = np.full((len(texts), width), -1, dtype=np.int64, order="F" if transposed else "C")
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    indexes = [NgramIndex(1, 3) for _ in texts]
    NgramIndex.extend_batch(indexes, padded, np.array([len(t) for t in texts], dtype=np.int64))
    tokens, parents = NgramIndex.propose_batch(indexes, 9, 3)
    for row, text in enumerate(texts):
        expected_tokens, expected_parents = ngram.propose(text, 1, 3, 9, 3)
        unused = 9 - len(expected_tokens)
        assert tokens[row].tolist() == [text[-1], *expected_tokens, *[0] * unused]
        assert parents[row].tolist() == [-1, *expected_parents, *[-2] * unused]


def test_threads_may_use_their_own_indexes():
    """Calls release the GIL."""
    texts = np.random.default_rng(1).integers(0, 3, (4, 20_000))
    results = [None] * len(texts)

    def work(row):
        index = NgramIndex(1, 4)
        for chunk in np.array_split(texts[row], 50):
            index.extend(chunk)
            results[row] = NgramIndex.propose_batch([index], 16, 3)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row, text in enumerate(texts):
        tokens, parents = results[row]
        expected = draft(index_of(text, 1, 4), 16, 3)
        assert (tokens[0, 1:].tolist(), parents[0, 1:].tolist()) == expected


# ---------------------------------------------------------------- time and memory

HOSTILE_TEXTS = {
    "one token": lambda n: np.full(n, 7),
    "period 2": lambda n: np.arange(n) % 2,
    "all different": lambda n: np.arange(n),
    "all different, low bits equal": lambda n: (np.arange(n) * 2048) % (2**31 - 1),
    "never matches what follows": lambda n: np.where(np.arange(n) % 2, np.arange(n), 0),
    "random bits": lambda n: np.random.default_rng(2).integers(0, 2, n),
}


@pytest.mark.parametrize("make", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS.keys())
def test_time_is_linear_on_hostile_text(make):
    """Linear work on a million tokens takes a fraction of a second, quadratic work hours."""
    num_tokens = 1_000_000
    text = make(num_tokens).astype(np.int64)
    index = NgramIndex(1, 4)
    start = time.perf_counter()
    index.extend(text)
    for _ in range(1000):
        index.propose(32, 4)
    assert time.perf_counter() - start < 20
    assert index.memory_bytes() <= (8 + 24 * 4) * num_tokens + 4096


@pytest.mark.parametrize("num_tokens", [0, 1, 19, 99, 989, 20_000])
def test_memory_is_bounded(num_tokens):
    text = np.random.default_rng(3).integers(0, 50_000, num_tokens)
    for min_ngram, max_ngram in ((1, 1), (2, 4), (1, 8)):
        num_lengths = max_ngram - min_ngram + 1
        bound = (8 + 24 * num_lengths) * num_tokens + 256 * num_lengths
        assert index_of(text, min_ngram, max_ngram).memory_bytes() <= bound


# ---------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2), "min_ngram must be at least 1, got 0"),
        ((-3, 2), "min_ngram must be at least 1, got -3"),
        ((3, 2), "max_ngram must be at least min_ngram = 3, got 2"),
        ((1, 65), r"max_ngram must be at most 64 \(.*\), got 65"),
    ],
)
def test_rejects_bad_lengths(arguments, message):
    with pytest.raises(ValueError, match=message):
        NgramIndex(*arguments)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (np.array([1, 2, -1]), ValueError, r"tokens\[2\] is -1: .* \[0, 2147483647\].*padding"),
        (np.array([2**31]), ValueError, r"tokens\[0\] is 2147483648"),
        (np.zeros((2, 2), np.int64), ValueError, r"tokens must be .* 1 dim.*, got 2 dim"),
        (np.array(3), ValueError, r"tokens must be .* 1 dim.*, got 0 dim"),
        (np.zeros(2, np.int32), TypeError, r"got dtype int32; pass tokens\.astype\(numpy\.int64\)"),
        (np.zeros(2), TypeError, "got dtype float64"),
        (np.zeros(2, ">i8"), TypeError, "got dtype >i8"),
        ([1, 2], TypeError, r"got list; pass numpy\.asarray\(tokens, dtype=numpy\.int64\)"),
    ],
    ids=["negative", "too large", "2-D", "0-D", "int32", "float", "byte order", "list"],
)
def test_extend_rejects(tokens, error, message):
    index = index_of([1, 2, 1], 1, 2)
    with pytest.raises(error, match=message):
        index.extend(tokens)
    assert len(index) == 3
    assert draft(index, 2, 1) == ([2, 1], [0, 1])


def test_largest_token_id_is_accepted():
    assert draft(index_of([2**31 - 1, 0, 2**31 - 1], 1, 1), 2, 1) == ([0, 2**31 - 1], [0, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1), r"num_tokens must be in \[0, 2147483646\], got -1"),
        ((2**31 - 1, 1), r"num_tokens must be in .*, got 2147483647"),
        ((4, 0), r"num_branches must be at least 1 \(1 drafts a chain\), got 0"),
    ],
)
def test_propose_rejects(arguments, message):
    index = index_of([1, 1], 1, 1)
    with pytest.raises(ValueError, match=message):
        index.propose(*arguments)
    with pytest.raises(ValueError, match=message):
        NgramIndex.propose_batch([index], *arguments)
    with pytest.raises(ValueError, match=message):
        NgramIndex(1, 1).propose(*arguments)


def test_propose_batch_rejects_a_row_without_root():
    with pytest.raises(ValueError, match=r"indexes\[1\] is empty.*extend it with the prompt"):
        NgramIndex.propose_batch([index_of([1], 1, 1), NgramIndex(1, 1)], 2, 1)
    with pytest.raises(TypeError, match=r"indexes\[0\] must be an NgramIndex, got None"):
        NgramIndex.propose_batch([None], 2, 1)


@pytest.mark.parametrize(
    ("tokens", "counts", "error", "message"),
    [
        ([[1, 2], [3, -1]], [2, 2], ValueError, r"tokens\[1, 1\] is -1: .* smaller counts\[1\]"),
        ([[1, 2], [3, 4]], [2, 3], ValueError, r"counts\[1\] must be in \[0, 2\].*, got 3"),
        ([[1, 2], [3, 4]], [-1, 2], ValueError, r"counts\[0\] must be in \[0, 2\].*, got -1"),
        ([[1, 2]], [2, 2], ValueError, r"one row for each of the 2 indexes, got 1 and 2"),
        ([[1, 2], [3, 4]], [2], ValueError, r"one row for each of the 2 indexes, got 2 and 1"),
        ([1, 2], [2, 2], ValueError, r"tokens must be .* 2 dim.*, got 1 dim"),
        ([[1, 2], [3, 4]], [[2, 2]], ValueError, r"counts must be .* 1 dim.*, got 2 dim"),
        ([[1, 2], [3, 4]], [2.0, 2.0], TypeError, r"counts must be .*, got dtype float64"),
    ],
)
def test_extend_batch_rejects_before_appending(tokens, counts, error, message):
    indexes = [NgramIndex(1, 2), NgramIndex(1, 2)]
    with pytest.raises(error, match=message):
        NgramIndex.extend_batch(indexes, np.array(tokens), np.array(counts))
    assert [len(index) for index in indexes] == [0, 0]
