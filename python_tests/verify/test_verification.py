"""``generate(verification=...)``: drafts sampled from known probabilities, verified by rules 2, 3 and 4.

Claims: with every rule, draft model and logits processor the text has the target's distribution (chi-square
over the rows of one call with one prompt, against the distribution of the target's logits). A seed determines
the text. Greedy decoding is the same under all rules. Drafts that a rule can't verify are refused.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from helpers.checks.distributions import chi_square_excess
from helpers.models.tiny import SIZES, prompts, tiny_model
from helpers.ops.op_cases import generator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

import specdec_ext
from specdec_ext import Drafter, DraftModelDrafter, DraftTree, NgramDrafter
from specdec_ext.drafters.draft_cache import DraftCache

VOCAB = 4
LENGTH = 4  # of the compared texts: a token after the prompt, then rounds with two drafts
ROWS = 1 << 12
PROMPT = [1, 3]
WARPERS = {
    "plain": {},
    "filters": dict(temperature=1.4, top_k=3, top_p=0.9),
    "repetition-penalty": dict(repetition_penalty=1.6),
    "bad-words": dict(bad_words_ids=[[2, 3], [1, 1]], temperature=0.8),
}


@functools.cache
def small_model(seed: int) -> PreTrainedModel:
    sizes = dict(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, max_position_embeddings=32)
    ones = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = AutoConfig.for_model("llama", **{**SIZES, **sizes, **dict.fromkeys(ones, 1)})
    model = AutoModelForCausalLM.from_config(config)
    rng = generator(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.4)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


class SampledTree(Drafter):
    """Two children of the root and one grandchild, drawn without replacement from fixed probabilities."""

    sampled = True

    def __init__(self):
        self.random = generator(3)
        self.probabilities = torch.randn(VOCAB, VOCAB, generator=self.random).softmax(dim=-1)

    def propose(self, context):
        noise = torch.rand(len(context.rows), 2, VOCAB, generator=self.random)
        children = (self.probabilities[context.roots] / -noise[:, 0].log()).argsort(
            1, descending=True
        )
        grandchild = (self.probabilities[children[:, 0]] / -noise[:, 1].log()).argmax(
            1, keepdim=True
        )
        tokens = torch.cat([context.roots[:, None], children[:, :2], grandchild], dim=1)
        parents = torch.tensor([-1, 0, 0, 1]).expand_as(tokens)
        return DraftTree(tokens, parents, self.probabilities[tokens])


def sample(drafter, rule, rows=ROWS, length=LENGTH, seed=7, **kwargs):
    ids = torch.tensor(PROMPT).expand(rows, -1)
    kwargs = dict(do_sample=True, top_k=0, seed=seed, max_new_tokens=length) | kwargs
    kwargs |= dict(attention_mask=torch.ones_like(ids), drafter=drafter, verification=rule)
    return specdec_ext.generate(small_model(1), ids, **kwargs)


def scores_after(prefixes: torch.Tensor, **kwargs) -> torch.Tensor:
    """Transformers' processed scores of the next token."""
    kwargs = dict(do_sample=True, top_k=0) | kwargs
    kwargs |= dict(attention_mask=torch.ones_like(prefixes), max_new_tokens=1)
    kwargs |= dict(return_dict_in_generate=True, output_scores=True)
    return small_model(1).generate(prefixes, **kwargs).scores[0]


def distribution(**kwargs) -> torch.Tensor:
    """``[VOCAB ** LENGTH]`` probabilities of the texts: transformers' scores of every prefix."""
    texts = torch.ones(1, dtype=torch.double)
    for length in range(LENGTH):
        prefixes = [[*PROMPT, *p] for p in itertools.product(range(VOCAB), repeat=length)]
        steps = scores_after(torch.tensor(prefixes), **kwargs).double().softmax(dim=-1)
        texts = (texts[:, None] * steps).flatten()
    return texts


def excess(texts: torch.Tensor, expected: torch.Tensor) -> float:
    """A chi-square statistic; above 1, the texts do not have this distribution."""
    cells = texts[:, len(PROMPT) :] @ (VOCAB ** torch.arange(LENGTH - 1, -1, -1))
    return chi_square_excess(torch.bincount(cells, minlength=VOCAB**LENGTH), expected)


def draft_model(**kwargs) -> DraftModelDrafter:
    return DraftModelDrafter(small_model(2), num_draft_tokens=2, sampled=True, **kwargs)


CASES = {
    "rejection": ("rejection", draft_model, "filters"),
    "block": ("block", draft_model, "repetition-penalty"),
    "block-that-stops-early": ("block", functools.partial(draft_model, min_confidence=0.25), "plain"),
    "recursive": ("recursive", SampledTree, "bad-words"),
    "recursive-chain": ("recursive", draft_model, "repetition-penalty"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_text_has_the_distribution_of_the_target(case):
    rule, drafter, warpers = CASES[case]
    texts = sample(drafter(), rule, **WARPERS[warpers])
    assert excess(texts, distribution(**WARPERS[warpers])) < 1


@pytest.mark.slow
@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize("case", ["rejection", "block", "block-that-stops-early", "recursive"])
def test_many_texts_have_the_distribution_of_the_target(case, warpers):
    """Every rule with all processors, 2^15 texts each."""
    rule, drafter, _ = CASES[case]
    kwargs = WARPERS[warpers]
    texts = [sample(drafter(), rule, 4 * ROWS, seed=seed, **kwargs) for seed in range(2)]
    assert excess(torch.cat(texts), distribution(**WARPERS[warpers])) < 1


class WrongProbabilities(SampledTree):
    """Reports probabilities of another temperature than that of its draws."""

    def propose(self, context):
        tree = super().propose(context)
        return DraftTree(tree.tokens, tree.parents, (tree.draft_probs**2.5).softmax(dim=-1))


class SortedSiblings(SampledTree):
    """Siblings in the order of their probabilities, not in that of their draws."""

    def propose(self, context):
        tree = super().propose(context)
        first, second = tree.tokens[:, 1], tree.tokens[:, 2]
        root = tree.draft_probs[:, 0]
        better = root.gather(1, first[:, None]) >= root.gather(1, second[:, None])
        pair = torch.where(better, tree.tokens[:, 1:3], tree.tokens[:, [2, 1]])
        tokens = torch.cat([tree.tokens[:, :1], pair], dim=1)
        return DraftTree(tokens, tree.parents[:, :3].contiguous(), self.probabilities[tokens])


@pytest.mark.parametrize("drafter", [WrongProbabilities, SortedSiblings])
def test_wrong_drafts_fail_the_distribution_test(drafter):
    assert excess(sample(drafter(), "recursive"), distribution()) > 1


def test_probabilities_of_other_nodes_fail_the_distribution_test():
    class Swapped(DraftModelDrafter):
        def propose(self, context):
            tree = super().propose(context)
            if tree.draft_probs is None:
                return tree
            return DraftTree(tree.tokens, tree.parents, tree.draft_probs.roll(1, dims=0))

    drafter = Swapped(small_model(2), num_draft_tokens=2, sampled=True)
    assert excess(sample(drafter, "block"), distribution()) > 1


@pytest.mark.parametrize("rule", ["rejection", "block", "recursive"])
def test_seed_determines_the_text(rule):
    texts = [sample(draft_model(), rule, rows=64, length=12, seed=seed) for seed in (5, 5, 6)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_target_as_draft_model_is_always_accepted():
    drafter = DraftModelDrafter(small_model(1), num_draft_tokens=3, sampled=True)
    kwargs = dict(temperature=0.7, return_dict_in_generate=True)
    out = sample(drafter, "rejection", rows=32, length=16, **kwargs)
    assert out.speculation_stats.acceptance_rate == 1.0


def test_block_accepts_more_than_rejection():
    drafter = DraftModelDrafter(small_model(2), num_draft_tokens=4, sampled=True)
    rates = {}
    for rule in ("rejection", "block"):
        out = sample(drafter, rule, rows=512, length=16, return_dict_in_generate=True)
        rates[rule] = out.speculation_stats.mean_acceptance_length
    assert rates["block"] > rates["rejection"] > 1.2


def test_recorded_scores_are_the_targets():
    kwargs = dict(temperature=0.6, repetition_penalty=1.3)
    recorded = dict(return_dict_in_generate=True, output_scores=True)
    out = sample(draft_model(), "block", rows=3, length=6, **recorded, **kwargs)
    for step, scores in enumerate(out.scores):
        expected = scores_after(out.sequences[:, : len(PROMPT) + step], **kwargs)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drafter", [NgramDrafter(min_ngram=1), "sampled", None])
@pytest.mark.parametrize("rule", ["rejection", "block", "recursive"])
def test_greedy_text_is_the_same_under_all_rules(rule, drafter):
    model = tiny_model("llama")
    ids, mask = prompts((12, 3, 9))
    kwargs = dict(attention_mask=mask, max_new_tokens=16, do_sample=False)
    if drafter == "sampled":
        drafter = DraftModelDrafter(model, sampled=True)
    options = dict(drafter=drafter, verification=rule, return_dict_in_generate=True)
    out = specdec_ext.generate(model, ids, **options, **kwargs)
    assert torch.equal(out.sequences, model.generate(ids, **kwargs))
    if isinstance(drafter, DraftModelDrafter):  # without noise it drafts the arg-max
        assert out.speculation_stats.acceptance_rate == 1.0


def test_plain_sampling_under_other_rules_and_with_matched_drafts():
    """Without a drafter all rules give one text, which drafts don't change under the match rule."""
    expected = sample(None, "match", rows=16, length=12)
    assert torch.equal(sample(draft_model(), "match", rows=16, length=12), expected)
    assert torch.equal(sample(None, "block", rows=16, length=12), expected)


# --- refusals


class WithMemory(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class Without(SampledTree):
    def propose(self, context):
        tree = super().propose(context)
        return DraftTree(tree.tokens, tree.parents)


class WrongShape(SampledTree):
    def propose(self, context):
        tree = super().propose(context)
        return DraftTree(tree.tokens, tree.parents, tree.draft_probs[:, :2])


class Impossible(SampledTree):
    def propose(self, context):
        tree = super().propose(context)
        tree.draft_probs[:, 0] = 0
        return tree


REFUSED = {
    "unknown rule": (dict(rule="lossy"), "verification='lossy' is not known; expected one of"),
    "a drafter that does not sample": (dict(drafter="ngram"),
        "needs a drafter that samples its drafts .* NgramDrafter does not. Use verification='match'"),
    "a draft model that does not sample": (dict(drafter=DraftModelDrafter(small_model(2))),
        "DraftModelDrafter.model, sampled=True.; DraftModelDrafter does not"),
    "a processor that may keep state": (dict(logits_processor=LogitsProcessorList([WithMemory()])),
        "verification='block' can't be combined with the logits processors WithMemory: they may keep"),
    "a tree without probabilities": (dict(drafter=Without(), rule="recursive"),
        "Without returned a DraftTree without draft_probs, which verification='recursive' needs"),
    "a tree under a rule for chains": (dict(drafter=SampledTree()),
        "SampledTree returned a tree in which nodes have several children; verification='block' is for"),
    "probabilities of another shape": (dict(drafter=WrongShape(), rule="recursive"),
        r"draft_probs are torch.float32 \(2, 2, 4\); expected torch.float32 of shape \(2, 4, 4\)"),
    "a token that can't have been drawn": (dict(drafter=Impossible(), rule="recursive"),
        r"token \d \(row 0, node 1\) has draft probability 0; draft_probs must contain"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unverifiable_drafts_are_refused(case):
    kwargs, message = REFUSED[case]
    kwargs = {"drafter": draft_model(), "rule": "block", **kwargs}
    with pytest.raises(ValueError, match=message):
        sample(rows=2, length=8, **kwargs)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_min_confidence_must_be_a_probability(value):
    with pytest.raises(ValueError, match="min_confidence is a probability"):
        DraftModelDrafter(small_model(2), min_confidence=value)


def test_draft_model_with_nan_logits_stops_drafting(monkeypatch):
    """They are NaN from the second token of a draft on."""
    read = DraftCache.read
    monkeypatch.setattr(
        DraftCache,
        "read",
        lambda cache, tokens: read(cache, tokens) * (torch.nan if len(tokens[0]) == 1 else 1.0),
    )
    drafter = DraftModelDrafter(small_model(2), num_draft_tokens=3, sampled=True)
    out = sample(drafter, "block", rows=8, length=12, return_dict_in_generate=True)
    assert out.sequences.shape == (8, len(PROMPT) + 12)
    assert out.speculation_stats.draft_tokens <= out.speculation_stats.drafts


# --- early stop


def test_drafts_end_with_the_first_token_of_low_confidence():
    """In each row's draft all tokens are confident, except the last one of a draft that was cut."""
    model = draft = tiny_model("llama")
    ids, mask = prompts((12, 3, 9, 5))

    class Compared(DraftModelDrafter):
        def propose(self, context):
            tree = super().propose(context)
            lengths.append([])
            for row, depths in enumerate(tree.depths):
                drafts = tree.tokens[row, 1 : max(depths) + 1].tolist()
                text = torch.tensor([context.text(context.rows[row]) + drafts])
                probs = draft(text).logits[0, -len(drafts) - 1 : -1].softmax(dim=-1)
                confident = [probs[i, token] >= 0.2 for i, token in enumerate(drafts)]
                full = min(5, min(context.remaining) - 1)
                assert all(confident[:-1]) and (len(drafts) == full or not confident[-1])
                lengths[-1].append(len(drafts))
            assert tree.num_nodes == 1 + max(lengths[-1])  # drafting ends with the last row
            return tree

    lengths: list[list[int]] = []
    drafter = Compared(draft, num_draft_tokens=5, min_confidence=0.2)
    kwargs = dict(attention_mask=mask, max_new_tokens=24, do_sample=False)
    specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
    seen = {length for step in lengths for length in step}
    assert {1, 2, 3} <= seen and any(max(step) > min(step) for step in lengths)
