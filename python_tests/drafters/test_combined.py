"""``CombinedDrafter``: who drafts for which row, models that are asked now and then, lossless text."""

from __future__ import annotations

import pytest
import torch
from head_cases import TREES, head_of
from lossless import (
    NEW_TOKENS,
    check_same_text,
    every_batch,
    every_decoding,
    generate,
    plain_text,
)
from medusa_cases import random_heads
from tiny import prompts, tiny_model, wrong

import specdec_ext
from specdec_ext import (
    CombinedDrafter,
    Drafter,
    DraftModelDrafter,
    DraftTree,
    HeadDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    NgramDrafter,
    SuffixDrafter,
    TreeConfig,
)
from specdec_ext.context import Context
from specdec_ext.drafters.retrieval import RetrievalDrafter
from specdec_ext.tree.config import Lookup


class Says(Drafter):
    """Proposes what a function of (row, tokens generated) says: paths below the root."""

    def __init__(self, paths):
        self.paths, self.calls, self.committed = paths, 0, 0

    def propose(self, context):
        self.calls += 1
        paths = [self.paths(row, len(context.generated[row])) for row in context.rows]
        return DraftTree.from_paths(context.roots, paths)

    def commit(self, context, accepted, output):
        self.committed += 1


class Recalls(Says, RetrievalDrafter):
    """The same with match lengths: those of ``lengths(row, tokens generated)``."""

    def __init__(self, paths, lengths):
        super().__init__(paths)
        self.lengths = lengths

    def propose(self, context):
        self._match_lengths = [
            self.lengths(row, len(context.generated[row])) for row in context.rows
        ]
        return super().propose(context)

    longest_match = 9

    @property
    def match_lengths(self):
        return self._match_lengths


def context_of(rows: int) -> Context:
    ids = torch.zeros(rows, 2, dtype=torch.long)
    context = Context(ids, None, 0, 50, draw=None, sample=None)
    context.generated = [[row] for row in range(rows)]
    return context


# ---------------------------------------------------------------- who drafts


@pytest.mark.parametrize(
    ("max_nodes", "tokens", "parents"),
    [
        (
            None,
            [[0, 10, 11, 12], [1, 20, 21, 0], [2, 20, 21, 0]],
            [[-1, 0, 1, 2], [-1, 0, 1, -2], [-1, 0, 1, -2]],
        ),
        (
            5,
            [[0, 10, 11, 12, 0], [1, 20, 21, 10, 11], [2, 20, 21, 10, 11]],
            [[-1, 0, 1, 2, -2], [-1, 0, 1, 0, 3], [-1, 0, 1, 0, 3]],
        ),
        # Neither tree of a single drafter is cut.
        (
            2,
            [[0, 10, 11, 12], [1, 20, 21, 0], [2, 20, 21, 0]],
            [[-1, 0, 1, 2], [-1, 0, 1, -2], [-1, 0, 1, -2]],
        ),
    ],
    ids=["none added", "filled up", "no room"],
)
def test_a_long_match_takes_its_row_over(max_nodes, tokens, parents):
    retrieval = Recalls(lambda row, _: [[10, 11, 12]], lambda row, _: [4, 3, 0][row])
    model = Says(lambda row, _: [[20, 21]])
    drafter = CombinedDrafter(retrieval, model, min_match=4, max_nodes=max_nodes)
    tree = drafter.propose(context_of(3))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == (tokens, parents)
    assert drafter.lookups == [Lookup("copy, match of 3 to 4"), None, None]


def test_nobody_is_asked_in_vain():
    retrieval = Recalls(lambda row, _: [[10]], lambda row, _: 4)
    model = Says(lambda row, _: [[20]])
    assert CombinedDrafter(retrieval, model, 4).propose(context_of(2)).tokens.tolist() == [
        [0, 10],
        [1, 10],
    ]
    assert model.calls == 0
    tree = CombinedDrafter(retrieval, model, 5).propose(context_of(2))
    assert tree.tokens.tolist() == [[0, 20], [1, 20]] and model.calls == 1


def test_equal_proposals_are_one():
    retrieval = Recalls(lambda row, _: [[20, 30]], lambda row, _: 1)
    model = Says(lambda row, _: [[20, 21]])
    tree = CombinedDrafter(retrieval, model, 2, max_nodes=9).propose(context_of(1))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([[0, 20, 21, 30]], [[-1, 0, 1, 1]])


def test_both_hear_what_was_accepted():
    retrieval, model = Recalls(lambda *_: [], lambda *_: 0), Says(lambda *_: [])
    drafter = CombinedDrafter(retrieval, model)
    stats = generate(drafter, "one", "greedy", speculation="fixed").speculation_stats
    assert retrieval.committed == model.committed == stats.steps == NEW_TOKENS - 1


def test_match_lengths_of_the_drafters_that_ship():
    ids = torch.tensor([[5, 6, 7, 8, 5, 6], [1, 2, 3, 4, 5, 6]])
    context = Context(ids, None, 0, 50, draw=None, sample=None)
    context.generated = [[7], [9]]
    for drafter in (NgramDrafter(), SuffixDrafter()):
        drafter.start(context, tiny_model("llama"), None)
        drafter.propose(context)
        assert drafter.match_lengths == [3, 0]
        assert drafter.lookups == [Lookup("copy, match of 3 to 4"), Lookup("no match")]


# ---------------------------------------------------------------- models that are asked now and then


@pytest.mark.parametrize("batch", ["one", "five-ragged"])
def test_a_draft_model_catches_up(batch):
    """Every other step is taken over with wrong tokens; the target as its own draft model stays right.

    A step of the one kind emits one token, of the other four drafts and the bonus: 31 tokens take 11 steps.
    """
    answers = plain_text(batch, "greedy")[:, -NEW_TOKENS:].tolist()
    taken = [False]

    def paths(row, done):
        return [[wrong(token) for token in answers[row][done : done + 3]]]

    class EveryOther(Recalls):
        def propose(self, context):
            taken[0] = not taken[0]
            return super().propose(context)

    retrieval = EveryOther(paths, lambda *_: 9 if taken[0] else 0)
    drafter = CombinedDrafter(retrieval, DraftModelDrafter(tiny_model("llama"), 4))
    stats = check_same_text(drafter, batch, "greedy")
    rows = 1 if batch == "one" else 5
    assert stats.steps == 11 * rows and stats.accepted_tokens == 4 * 5 * rows


PAIRS = {
    "ngram and another model": lambda: CombinedDrafter(
        NgramDrafter(min_ngram=1), DraftModelDrafter(tiny_model("qwen3")), 2, max_nodes=12
    ),
    "ngram tree and itself": lambda: CombinedDrafter(
        NgramDrafter(min_ngram=1, num_branches=3), DraftModelDrafter(tiny_model("llama")), 1
    ),
    "suffix and medusa": lambda: CombinedDrafter(
        SuffixDrafter(offset=3.0),
        MedusaDrafter(random_heads(), TreeConfig(depth=3, top_k=3, num_nodes=8)),
        1,
    ),
    "suffix and a head": lambda: CombinedDrafter(
        SuffixDrafter(offset=3.0), HeadDrafter(head_of("eagle3"), TREES["dynamic"]), 2, max_nodes=12
    ),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
@every_batch
@every_decoding
def test_the_text_of_plain_decoding(batch, decoding, pair):
    drafter = pair()
    first = check_same_text(drafter, batch, decoding)
    assert first.draft_tokens > 0
    if isinstance(drafter.retrieval, SuffixDrafter):  # the second time it knows the text
        again = check_same_text(drafter, batch, decoding)
        assert again.accepted_tokens > first.accepted_tokens


def test_rows_that_end_early():
    model = tiny_model("llama")
    ids, mask = prompts((12, 3, 9, 5, 12))
    stop = int(plain_text("five-ragged", "greedy")[2, 12 + 6])
    kwargs = dict(
        attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=stop
    )
    expected = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    for pair in PAIRS.values():
        assert torch.equal(specdec_ext.generate(model, ids, drafter=pair(), **kwargs), expected)


# ---------------------------------------------------------------- messages


def test_bad_arguments():
    ngram, model = NgramDrafter(), DraftModelDrafter(tiny_model("llama"))
    for arguments, error, message in (
        ((model, ngram), TypeError, "retrieval is a DraftModelDrafter; expected .* NgramDrafter"),
        ((ngram, LookaheadDrafter()), ValueError, "LookaheadDrafter reads .* use it alone"),
        ((ngram, model, 0), ValueError, "min_match must be in .* got 0"),
        ((ngram, model, 7), ValueError, r"in \[1, 6\], .* this NgramDrafter, got 7"),
        ((SuffixDrafter(max_match=5), model, 6), ValueError, r"in \[1, 5\]"),
        ((ngram, model, 3, 1), ValueError, "max_nodes counts the root .* got 1"),
    ):
        with pytest.raises(error, match=message):
            CombinedDrafter(*arguments)


def test_a_dead_head_is_still_noticed():
    model = DraftModelDrafter(tiny_model("llama"))
    assert (
        CombinedDrafter(NgramDrafter(), model).low_acceptance_hint
        == model.low_acceptance_hint
        != ""
    )
