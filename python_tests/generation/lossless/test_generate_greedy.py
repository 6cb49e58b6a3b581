"""Greedy text equals HF generate token for token, in float32, with every draft.

Claim: for every architecture, batch shape, drafter and tree shape ``specdec_ext.generate`` returns the ids of
``model.generate``. The scripted drafters propose the right continuation, its opposite, mixtures and noise, as
chains and as trees.
"""

import pytest
import torch
from helpers.models.tiny import (
    ARCHITECTURES,
    BATCHES,
    SHAPES,
    ScriptedDrafter,
    every_batch,
    generated,
    greedy_text,
    prompts,
    tiny_model,
)

import specdec_ext
from specdec_ext import DraftModelDrafter, NgramDrafter

NEW_TOKENS = 24
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def reference(name: str, batch: str, attn_implementation: str | None = None):
    """(model, ids, keywords, HF's text)."""
    model = tiny_model(name, attn_implementation)
    ids, mask, expected = greedy_text(name, BATCHES[batch], NEW_TOKENS, attn_implementation)
    return (
        model,
        ids,
        dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False),
        expected,
    )


@every_batch
@every_architecture
def test_plain_decoding_equals_transformers(name, batch):
    model, ids, kwargs, expected = reference(name, batch)
    assert torch.equal(specdec_ext.generate(model, ids, drafter=None, **kwargs), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@every_batch
@every_architecture
def test_scripted_drafters_equal_transformers(name, batch, shape):
    model, ids, kwargs, expected = reference(name, batch)
    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
    assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)


@every_batch
@every_architecture
def test_ngram_and_draft_models_equal_transformers(name, batch):
    model, ids, kwargs, expected = reference(name, batch)
    other = tiny_model("llama" if name != "llama" else "qwen3")
    for drafter in (
        NgramDrafter(min_ngram=1),
        NgramDrafter(num_draft_tokens=12, min_ngram=1, num_branches=3),
        DraftModelDrafter(model),
        DraftModelDrafter(other, num_draft_tokens=1),
        other,
    ):
        actual = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
        assert torch.equal(actual, expected), drafter


def test_eager_attention_gets_an_additive_mask():
    """If a boolean mask were added to the scores, every node would see its siblings."""
    model, ids, kwargs, expected = reference("llama", "five-ragged", "eager")
    for shape in SHAPES:
        drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
        assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)


@pytest.mark.parametrize("prompt", [20, 40], ids=["prompt-fits", "prompt-does-not-fit"])
def test_draft_model_with_fewer_positions_stops_drafting(prompt):
    """It has 32 learned positions; the text is longer."""
    model, short = tiny_model("gpt2"), tiny_model("gpt2-short")
    ids, mask = prompts((prompt, prompt - 5))
    kwargs = dict(attention_mask=mask, max_new_tokens=30, do_sample=False)
    with pytest.warns(UserWarning, match="has 32 positions"):
        actual = specdec_ext.generate(model, ids, drafter=short, **kwargs)
    assert torch.equal(actual, model.generate(ids, **kwargs))


def test_trees_may_have_more_than_64_nodes():
    """Their ancestors need two words of bits."""
    model = tiny_model("llama")
    ids, mask = prompts((6, 4))
    kwargs = dict(attention_mask=mask, max_new_tokens=20, do_sample=False)
    expected = model.generate(ids, **kwargs)

    def bushy(right, rng):
        return [[rng.randrange(97) for _ in range(3)] for _ in range(30)] + [right]

    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), bushy)
    out = specdec_ext.generate(model, ids, drafter=drafter, return_dict_in_generate=True, **kwargs)
    assert torch.equal(out.sequences, expected)
    assert out.speculation_stats.draft_tokens > 64 * out.speculation_stats.drafts


def test_half_precision_differs_from_plain_only_at_near_ties():
    model = tiny_model("llama", dtype=torch.bfloat16)
    for seed in range(4):
        ids, _ = prompts((9,), seed=seed)
        kwargs = dict(max_new_tokens=32, do_sample=False)
        plain = specdec_ext.generate(model, ids, drafter=None, **kwargs)
        drafted = specdec_ext.generate(model, ids, drafter=NgramDrafter(min_ngram=1), **kwargs)
        verdict = specdec_ext.compare_runs(model, plain[0], drafted[0], 9).verdict
        assert verdict in ("equal", "near-tie")
