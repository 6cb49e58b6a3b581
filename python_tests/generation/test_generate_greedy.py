"""Greedy text equals HF generate token for token, in float32, whatever is drafted.

Claim: for every architecture, batch shape, drafter and tree shape ``specdec_ext.generate`` returns the very
ids of ``model.generate``. The scripted drafters know the right continuation and propose it, its opposite,
mixtures and noise, as chains and as trees; what they propose must not show in the text.
"""

import pytest
import torch
from tiny import ARCHITECTURES, SHAPES, ScriptedDrafter, generated, prompts, tiny_model

import specdec_ext
from specdec_ext import DraftModelDrafter, NgramDrafter

BATCHES = {"one": (7,), "five-ragged": (12, 3, 9, 5, 12)}
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def reference():
    """HF's own text per (architecture, batch), computed once."""
    texts = {}

    def of(name: str, batch: str) -> tuple:
        if (name, batch) not in texts:
            ids, mask = prompts(BATCHES[batch])
            kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
            texts[name, batch] = (ids, kwargs, tiny_model(name).generate(ids, **kwargs))
        return texts[name, batch]

    return of


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_decoding_through_our_loop(reference, name, batch):
    ids, kwargs, expected = reference(name, batch)
    assert torch.equal(
        specdec_ext.generate(tiny_model(name), ids, drafter=None, **kwargs), expected
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scripted_drafters(reference, name, batch, shape):
    ids, kwargs, expected = reference(name, batch)
    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
    actual = specdec_ext.generate(tiny_model(name), ids, drafter=drafter, **kwargs)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ngram_and_draft_models(reference, name, batch):
    ids, kwargs, expected = reference(name, batch)
    model = tiny_model(name)
    stranger = tiny_model("llama" if name != "llama" else "qwen3")
    for drafter in (
        NgramDrafter(min_ngram=1),
        NgramDrafter(num_draft_tokens=12, min_ngram=1, num_branches=3),
        DraftModelDrafter(model),
        DraftModelDrafter(stranger, num_draft_tokens=1),
        stranger,
    ):
        actual = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
        assert torch.equal(actual, expected), drafter


def test_a_perfect_draft_is_accepted_whole(reference):
    """Four right tokens a step and the bonus: 23 tokens after the first take five target passes."""
    ids, kwargs, _ = reference("llama", "one")
    drafter = DraftModelDrafter(tiny_model("llama"), num_draft_tokens=4)
    kwargs |= {"return_dict_in_generate": True, "speculation": "fixed"}
    stats = specdec_ext.generate(
        tiny_model("llama"), ids, drafter=drafter, **kwargs
    ).speculation_stats
    assert (stats.steps, stats.drafts, stats.emitted_tokens) == (5, 5, 23)
    assert stats.accepted_tokens == stats.draft_tokens == 18  # the last draft is cut at max_length


def test_eager_attention_gets_an_additive_mask():
    """A boolean mask added to the scores would let every node see its siblings."""
    ids, mask = prompts(BATCHES["five-ragged"])
    model = tiny_model("llama", attn_implementation="eager")
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = model.generate(ids, **kwargs)
    for shape in SHAPES:
        drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
        assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)


def test_learned_positions_are_never_exceeded():
    """GPT-2 has 256 positions: drafting past the last one would index out of its table."""
    model = tiny_model("gpt2")
    ids, mask = prompts((246,))
    kwargs = dict(attention_mask=mask, max_length=256, do_sample=False)
    expected = model.generate(ids, **kwargs)

    def long_chain(right, rng):
        return [(right + [1] * 12)[:12]]

    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), long_chain)
    assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)


@pytest.mark.parametrize("prompt", [20, 40], ids=["prompt-fits", "prompt-does-not-fit"])
def test_a_draft_model_with_fewer_positions_stops_drafting(prompt):
    """Its table of learned positions ends at 32, the text does not."""
    model, short = tiny_model("gpt2"), tiny_model("gpt2-short")
    ids, mask = prompts((prompt, prompt - 5))
    kwargs = dict(attention_mask=mask, max_new_tokens=30, do_sample=False)
    with pytest.warns(UserWarning, match="has 32 positions"):
        actual = specdec_ext.generate(model, ids, drafter=short, **kwargs)
    assert torch.equal(actual, model.generate(ids, **kwargs))


def test_a_tree_of_more_than_64_nodes():
    """Two words of ancestor bits."""
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


def test_the_hook_gives_the_same_text(reference):
    ids, kwargs, expected = reference("llama", "five-ragged")
    hook = specdec_ext.custom_generate(NgramDrafter(min_ngram=1))
    assert torch.equal(tiny_model("llama").generate(ids, custom_generate=hook, **kwargs), expected)


def test_half_precision_differs_from_plain_only_at_near_ties():
    model = tiny_model("llama", dtype=torch.bfloat16)
    for seed in range(4):
        ids, _ = prompts((9,), seed=seed)
        kwargs = dict(max_new_tokens=32, do_sample=False)
        plain = specdec_ext.generate(model, ids, drafter=None, **kwargs)
        drafted = specdec_ext.generate(model, ids, drafter=NgramDrafter(min_ngram=1), **kwargs)
        assert specdec_ext.compare_runs(model, plain[0], drafted[0], 9).verdict in (
            "equal",
            "near-tie",
        )
