"""``DraftCache``: rows join, leave, are read and cut in any order; logits are those of each whole text."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.models.tiny import VOCAB, tiny_model

from specdec_ext.drafters import draft_cache
from specdec_ext.drafters.draft_cache import DraftCache

BLOCK, PLACES = 8, 4


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(draft_cache, "BLOCK_TOKENS", BLOCK)


def tokens(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, most))]


def last_logits(model, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0, -1]


def read_and_check(cache: DraftCache, texts: dict[int, list[int]], new: list[list[int]]) -> None:
    """Read tokens of each row, and compare the logits with those of a pass over the whole text."""
    logits = cache.read(new)
    for row, added, scores in zip(cache.rows, new, logits, strict=True):
        texts[row] += added
        assert cache.lengths[row] == len(texts[row])
        torch.testing.assert_close(scores, last_logits(cache._model, texts[row]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("first", [0, 2], ids=["all join", "two begin together"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3-window", "gpt2"])
def test_logits_after_random_joins_reads_cuts_and_ends(name, first):
    model, rng = tiny_model(name), random.Random(first)
    cache = DraftCache(model, 200, PLACES)
    texts = {row: tokens(rng, 20) for row in range(first)}
    if texts:
        cache.begin(texts)
    ended, most = 0, 0
    for _ in range(40):
        free = [row for row in range(PLACES) if row not in texts]
        if free and rng.random() < 0.4:
            row = rng.choice(free)
            texts[row] = tokens(rng, 20)
            cache.join(row, list(texts[row]))
        cache.read_prompts()
        if cache.rows:
            read_and_check(cache, texts, [tokens(rng, 12) for _ in cache.rows])
            cuts = [rng.randint(0, min(6, len(texts[row]) - 1)) for row in cache.rows]
            cache.rewind(cuts)
            for row, count in zip(cache.rows, cuts, strict=True):
                texts[row] = texts[row][: len(texts[row]) - count]
        most = max(most, len(cache.rows))
        over = [row for row in texts if rng.random() < 0.1 or len(texts[row]) > 80]
        for row in over:
            del texts[row]
        cache.follow(texts.keys())
        ended += len(over)
    assert most >= 3 and ended > 5


def test_a_row_takes_the_number_of_one_that_was_dropped_before_it_was_read():
    model = tiny_model("llama")
    cache = DraftCache(model, 100, PLACES)
    texts = {0: [5, 6], 1: [9, 8, 7]}
    for row, text in texts.items():
        cache.join(row, list(text))
    cache.drop([0])
    texts[0] = [11, 12, 13]
    cache.join(0, list(texts[0]))
    cache.read_prompts()
    assert cache.rows == [1, 0]
    read_and_check(cache, texts, [[4], [3, 2]])


def test_other_rows_wait_for_one_block_of_prompts_at_most():
    """Prompts of 20, 3, 3 and 9 tokens, of which the first one has no row beside it."""
    model, rng, reads = tiny_model("llama"), random.Random(0), []
    cache = DraftCache(model, 100, PLACES)
    hook = model.register_forward_pre_hook(
        lambda _, given, kwargs: reads[-1].append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        for row, length in enumerate((20, 3, 3, 9)):
            cache.join(row, [rng.randrange(1, VOCAB) for _ in range(length)])
        rows = []
        for _ in range(4):
            reads.append([])
            cache.read_prompts()
            rows.append(len(cache.rows))
    finally:
        hook.remove()
    assert reads == [[8, 8, 4], [3, 3], [8], [1]]
    assert rows == [1, 3, 3, 4]
