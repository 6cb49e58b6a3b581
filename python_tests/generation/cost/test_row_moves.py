"""A row that ends costs few copies of the keys and values of other rows."""

from __future__ import annotations

import pytest
import torch
from helpers.models.tiny import tiny_model
from helpers.planned_engine import PlannedEngine

import specdec_ext
from specdec_ext.models.cache.slot_cache import SlotCache

PROMPT = [4, 5, 6, 7, 8]
# The rows that have ended before the last round, at different times.
ENDS = {"first": [0], "middle": [2], "two": [1, 2], "last": [3]}


@pytest.fixture
def moves(monkeypatch):
    """The rows that were written, and from which rows, of each change."""
    log, original = [], SlotCache.move_rows

    def move_rows(self, to, source):
        log.append((to.tolist(), source.tolist()))
        original(self, to, source)

    monkeypatch.setattr(SlotCache, "move_rows", move_rows)
    return log


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ("first", [([0], [3])]),
        ("middle", [([2], [3])]),
        ("two", [([1], [3])]),
        ("last", []),
    ],
)
def test_engine_moves_only_rows_that_go_on(ended, expected, moves):
    def plan(engine):
        handles = [
            engine.submit(PROMPT, max_new_tokens=6 if row in ENDS[ended] else 12, eos_token_id=None)
            for row in range(4)
        ]
        while any(handle.finish_reason is None for handle in handles):
            yield

    engine = PlannedEngine(tiny_model("llama"), drafter=None, max_rows=4)
    engine.run(plan(engine))
    assert moves == expected


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ("first", [([0, 3], [3, 0])]),
        ("middle", [([2, 3], [3, 2])]),
        ("two", [([1, 3], [3, 1])]),
        ("last", []),
    ],
)
def test_call_swaps_pairs_and_swaps_them_back(ended, expected, moves):
    """The cache that a call returns has all rows, so finished ones are kept."""

    def stop(ids, scores):
        rows = torch.tensor(ENDS[ended])
        return torch.isin(ids[:, 0], rows) & (ids.shape[1] >= len(PROMPT) + 7)

    specdec_ext.generate(
        tiny_model("llama"),
        torch.tensor([[row, *PROMPT] for row in range(4)]),
        stopping_criteria=[stop],
        drafter=None,
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=2,  # without one, transformers goes on with rows that have ended
        pad_token_id=0,
    )
    assert moves == expected * 2
