"""No policy changes the text: drafts may be missing, have any shape, be cut or be dropped.

The policy ``Chaos`` decides at random. Every drafter must continue correctly after steps without its drafts,
and after proposals that were verified in part or not at all.
"""

from __future__ import annotations

import functools
import random
from typing import Any, ClassVar

import pytest
import torch
from helpers.checks.lossless import check_same_text, generate, plain_text
from helpers.drafters import every_drafter
from helpers.drafters.head_cases import TREES, head_of
from helpers.models.tiny import ScriptedDrafter, generated, noisy_chain, random_tree, tiny_model

from specdec_ext import (
    CombinedDrafter,
    Drafter,
    DraftModelDrafter,
    HeadDrafter,
    NgramDrafter,
    SuffixDrafter,
    generation,
)
from specdec_ext.drafters.heads import unread
from specdec_ext.schedule.policy import Policy, offered

pytestmark = pytest.mark.filterwarnings("ignore:.*in the last")


class Chaos(Policy):
    """Steps with and without drafts, shapes and cuts are random; ``log`` counts the decisions."""

    log: ClassVar = {"plain": 0, "dropped": 0, "cut": 0, "whole": 0}

    def __init__(self, settings: Any, drafter: Drafter, *others: Any):
        super().__init__(drafter)
        self.random = random.Random(1)
        self.drafting = True

    def begin(self, context, stats):
        self.shapes = list(offered(self._drafter, context, None))

    def choose(self, context):
        if self.random.random() < 0.3:
            self.drafting = not self.drafting
            self._drafter.rest(not self.drafting and self.random.random() < 0.5)
        context.shape = self.random.choice(self.shapes)
        self.log["plain"] += not self.drafting
        return self.drafting

    def cut(self, tree, context):
        deepest = max(map(max, tree.depths))
        kept = self.random.randint(0, deepest)
        if self._drafter.whole:
            kept = self.random.choice([0, deepest])
        name = "whole" if kept == deepest else "cut" if kept else "dropped"
        self.log[name] += deepest > 0
        return tree.pruned([kept] * tree.num_rows)


def right_tokens(batch: str, decoding: str) -> list[list[int]]:
    text = plain_text(batch, decoding)
    return generated(text, text.shape[1] - 32)


KINDS = ("suffix tree", "lookahead", "medusa", "head", "p-eagle")
DRAFTERS = {
    **{name: every_drafter.DRAFTERS[name] for name in KINDS},
    "ngram": lambda: NgramDrafter(min_ngram=1, num_branches=2),
    "head, dynamic tree": lambda: HeadDrafter(head_of("eagle3"), TREES["dynamic"]),
    "the model itself": lambda: DraftModelDrafter(tiny_model("llama")),
    "ngram and model": lambda: CombinedDrafter(
        NgramDrafter(min_ngram=1), DraftModelDrafter(tiny_model("llama")), 2, max_nodes=10
    ),
    "suffix and head": lambda: CombinedDrafter(
        SuffixDrafter(offset=2.0), HeadDrafter(head_of("eagle3")), 2
    ),
    "scripted chain": functools.partial(ScriptedDrafter, shape=noisy_chain),
    "scripted tree": functools.partial(ScriptedDrafter, shape=random_tree),
}
CASES = [
    pytest.param("one", "greedy", id="one"),
    pytest.param("five-ragged", "greedy", id="ragged", marks=pytest.mark.slow),
    pytest.param("five-ragged", "sampled", id="ragged-sampled"),
]


@pytest.mark.parametrize(("batch", "decoding"), CASES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_policy_does_not_change_the_text(name, batch, decoding, monkeypatch):
    monkeypatch.setattr(generation, "Controller", Chaos)
    monkeypatch.setattr(Chaos, "log", dict.fromkeys(Chaos.log, 0))
    monkeypatch.setattr(unread, "MERGED_NODES", 3)
    monkeypatch.setattr(unread, "MAX_PENDING", 5)
    make = DRAFTERS[name]
    drafter = make(right_tokens(batch, decoding)) if name.startswith("scripted") else make()
    check_same_text(drafter, batch, decoding)
    assert Chaos.log["plain"]
    assert Chaos.log["dropped"] + Chaos.log["cut"] + Chaos.log["whole"], "nothing was proposed"


class EverySecondCall(Policy):
    """Every second call runs without the drafter, or with its lookups alone."""

    calls, lookups_alone = 0, False

    def __init__(self, settings: Any, drafter: Drafter, *others: Any):
        super().__init__(drafter)

    def drafter_of(self, rows, steps):
        EverySecondCall.calls += 1
        if EverySecondCall.calls % 2:
            return self._drafter
        return self._drafter.lookup_part if self.lookups_alone else None


@pytest.mark.parametrize("lookups_alone", [False, True])
@pytest.mark.parametrize("name", ["head", "suffix tree", "ngram and model"])
def test_drafter_continues_after_a_call_without_it(name, lookups_alone, monkeypatch):
    monkeypatch.setattr(generation, "Controller", EverySecondCall)
    monkeypatch.setattr(EverySecondCall, "calls", 0)
    monkeypatch.setattr(EverySecondCall, "lookups_alone", lookups_alone)
    drafter = DRAFTERS[name]()
    for _ in range(4):
        output = generate(drafter, "five-ragged", "greedy")
        assert torch.equal(output.sequences, plain_text("five-ragged", "greedy"))
        drafts = EverySecondCall.calls % 2 or (lookups_alone and drafter.lookup_part is not None)
        assert (output.speculation_stats.drafts > 0) == bool(drafts)


def test_chaos_makes_every_decision(monkeypatch):
    """Proposals are cut, dropped, kept whole and accepted."""
    monkeypatch.setattr(generation, "Controller", Chaos)
    monkeypatch.setattr(Chaos, "log", dict.fromkeys(Chaos.log, 0))
    stats = check_same_text(DRAFTERS["the model itself"](), "five-ragged", "greedy")
    assert min(Chaos.log.values()) > 0
    assert stats.accepted_tokens > 0
