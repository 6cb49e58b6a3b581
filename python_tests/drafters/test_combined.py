"""``CombinedDrafter``: which drafter drafts for a row, models that draft in some steps, lossless text."""

from __future__ import annotations

import pytest
import torch
from generation.cuda_like import CudaLike, cuda_like, reporting
from generation.trace import FROM_HOST, LAUNCH, TO_HOST, Trace, differences
from helpers.checks.lossless import (
    NEW_TOKENS,
    check_same_text,
    every_decoding,
    generate,
    plain_text,
)
from helpers.drafters.drafting_contexts import context_of, started
from helpers.drafters.every_drafter import DRAFTERS
from helpers.drafters.head_cases import TREES, head_of
from helpers.models.tiny import every_batch, prompts, tiny_model, wrong

import specdec_ext
from specdec_ext import (
    CombinedDrafter,
    Drafter,
    DraftModelDrafter,
    DraftTree,
    HeadDrafter,
    LookaheadDrafter,
    NgramDrafter,
    SuffixDrafter,
)
from specdec_ext.drafters.lookup.retrieval import RetrievalDrafter
from specdec_ext.tree.config import Lookup
from specdec_ext.tree.draft_tree import INACTIVE


def rows(count: int):
    """A context with a row for each root from 0."""
    return context_of([[0, 0, row] for row in range(count)])


class Proposes(Drafter):
    """Proposes the paths that a function of (row, number of generated tokens) returns."""

    def __init__(self, paths):
        self.paths, self.calls, self.committed = paths, 0, 0

    def propose(self, context):
        self.calls += 1
        paths = [self.paths(row, len(context.generated[row])) for row in context.rows]
        return DraftTree.from_paths(context.roots, paths)

    def commit(self, context, accepted, output):
        self.committed += 1


class Recalls(Proposes, RetrievalDrafter):
    """The same with match lengths ``lengths(row, number of generated tokens)``."""

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


# ---------------------------------------------------------------- which drafter drafts


ALONE = (
    [[0, 10, 11, 12], [1, 20, 21, 0], [2, 20, 21, 0]],
    [[-1, 0, 1, 2], [-1, 0, 1, -2], [-1, 0, 1, -2]],
)


@pytest.mark.parametrize(
    ("max_nodes", "tokens", "parents"),
    [
        (None, *ALONE),
        (5, [[0, 10, 11, 12, 0], [1, 20, 21, 10, 11], [2, 20, 21, 10, 11]],
            [[-1, 0, 1, 2, -2], [-1, 0, 1, 0, 3], [-1, 0, 1, 0, 3]]),
        (2, *ALONE),  # a tree of one drafter is not cut
    ],
    ids=["none added", "filled up", "no room"],
)  # fmt: skip
def test_retrieval_alone_drafts_after_a_long_match(max_nodes, tokens, parents):
    retrieval = Recalls(lambda row, _: [[10, 11, 12]], lambda row, _: [4, 3, 0][row])
    model = Proposes(lambda row, _: [[20, 21]])
    drafter = CombinedDrafter(retrieval, model, min_match=4, max_nodes=max_nodes)
    tree = drafter.propose(rows(3))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == (tokens, parents)
    assert drafter.lookups == [Lookup("copy, match of 3 to 4"), None, None]


def test_model_is_not_called_if_all_rows_have_long_matches():
    retrieval = Recalls(lambda row, _: [[10]], lambda row, _: 4)
    model = Proposes(lambda row, _: [[20]])
    tree = CombinedDrafter(retrieval, model, 4).propose(rows(2))
    assert tree.tokens.tolist() == [[0, 10], [1, 10]] and model.calls == 0
    tree = CombinedDrafter(retrieval, model, 5).propose(rows(2))
    assert tree.tokens.tolist() == [[0, 20], [1, 20]] and model.calls == 1


def test_equal_paths_are_merged():
    retrieval = Recalls(lambda row, _: [[20, 30]], lambda row, _: 1)
    model = Proposes(lambda row, _: [[20, 21]])
    tree = CombinedDrafter(retrieval, model, 2, max_nodes=9).propose(rows(1))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([[0, 20, 21, 30]], [[-1, 0, 1, 1]])


@pytest.mark.parametrize("max_nodes", [None, 5, 12])
def test_a_round_drafts_on_the_device(max_nodes):
    """Two rounds make the same calls, without copies, and have the trees that the host proposes."""
    texts = [[[1, 2, 3, 4, 1, 2, 3], [4, 5, 6, 4, 5]], [[5, 6, 7, 5, 6, 8, 9], [4, 4, 6, 7, 4, 4]]]
    heads = [[[20, 21], [22]], [[6, 30], [31]]], [[[20], [6, 8]], [[6, 7], [4]]]
    retrieval = NgramDrafter(6, 1, 4, num_branches=2)

    def drafter(paths):
        return CombinedDrafter(retrieval, Proposes(lambda row, _: paths[row]), 3, max_nodes)

    def inputs(text, paths):
        roots = [row[-1] for row in text]
        tree = DraftTree.from_paths(torch.tensor(roots, device="cpu"), paths)
        lengths = torch.tensor([*map(len, text)], device="cpu")
        tokens = torch.tensor([row + [0] * (9 - len(row)) for row in text], device="cpu")
        return tokens, lengths, tree.tokens, tree.parents

    def draft(tokens, lengths, *tree):
        copied = retrieval.draft(tokens, lengths)
        trees = DraftTree(copied.tokens, copied.parents), DraftTree(*tree)
        made = drafter(heads[0]).combine(trees[0], copied.match_lengths, trees[1])
        return torch.stack([made.tokens, made.parents])

    traces, results = [], []
    with cuda_like():
        state = [CudaLike(each.clone()) for each in inputs(texts[0], heads[0])]
        for text, paths in zip(texts, heads, strict=True):
            for each, new in zip(state, inputs(text, paths), strict=True):
                each.inner.copy_(new)
            trace = Trace()
            with reporting(trace.add):
                results.append(draft(*state).inner.clone())
            assert [trace.count(kind) for kind in (TO_HOST, FROM_HOST)] == [0, 0]
            assert trace.count(LAUNCH) <= 16
            traces.append(trace)
        assert not list(differences(*traces))
    for text, paths, result in zip(texts, heads, results, strict=True):
        context = context_of(text)
        retrieval.start(context, None, None)
        tree = drafter(paths).propose(context)
        for ours, theirs in zip(result, (tree.tokens, tree.parents), strict=True):
            assert torch.equal(ours[:, : tree.num_nodes], theirs)
        assert (result[1, :, tree.num_nodes :] == INACTIVE).all()


def test_both_drafters_commit_every_step():
    retrieval, model = Recalls(lambda *_: [], lambda *_: 0), Proposes(lambda *_: [])
    drafter = CombinedDrafter(retrieval, model)
    stats = generate(drafter, "one", "greedy", speculation="fixed").speculation_stats
    assert retrieval.committed == model.committed == stats.steps == NEW_TOKENS - 1


def test_match_lengths_of_the_packages_drafters():
    context = context_of([[5, 6, 7, 8, 5, 6, 7], [1, 2, 3, 4, 5, 6, 9]])
    for drafter in (NgramDrafter(), SuffixDrafter()):
        started(drafter, context).propose(context)
        assert drafter.match_lengths == [3, 0]
        assert drafter.lookups == [Lookup("copy, match of 3 to 4"), Lookup("no match")]


# ---------------------------------------------------------------- models that draft in some steps


@pytest.mark.parametrize("batch", ["one", "five-ragged"])
def test_draft_model_catches_up(batch):
    """In every other step retrieval drafts wrong tokens; the target as its own draft model stays right.

    Steps emit one and five tokens in turn, so 31 tokens take 11 steps.
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
    **{name: DRAFTERS[name] for name in ("ngram and model", "suffix and medusa")},
    "ngram tree and itself": lambda: CombinedDrafter(
        NgramDrafter(min_ngram=1, num_branches=3), DraftModelDrafter(tiny_model("llama")), 1
    ),
    "suffix and a head": lambda: CombinedDrafter(
        SuffixDrafter(offset=3.0), HeadDrafter(head_of("eagle3"), TREES["dynamic"]), 2, max_nodes=12
    ),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
@every_batch
@every_decoding
def test_text_is_that_of_plain_decoding(batch, decoding, pair):
    drafter = pair()
    first = check_same_text(drafter, batch, decoding)
    assert first.draft_tokens > 0
    if isinstance(
        drafter.retrieval, SuffixDrafter
    ):  # the second call finds its text in the history
        again = check_same_text(drafter, batch, decoding)
        assert again.accepted_tokens > first.accepted_tokens


def test_rows_may_end_early():
    model = tiny_model("llama")
    ids, mask = prompts((12, 3, 9, 5, 12))
    stop = int(plain_text("five-ragged", "greedy")[2, 12 + 6])
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    kwargs["eos_token_id"] = stop
    expected = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    for pair in PAIRS.values():
        assert torch.equal(specdec_ext.generate(model, ids, drafter=pair(), **kwargs), expected)


# ---------------------------------------------------------------- messages


def test_invalid_arguments_are_refused():
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


def test_hint_for_low_acceptance_is_that_of_the_model():
    model = DraftModelDrafter(tiny_model("llama"))
    assert model.low_acceptance_hint
    assert CombinedDrafter(NgramDrafter(), model).low_acceptance_hint == model.low_acceptance_hint
