"""Sampled text with a seed is the same for every drafter, for every tree shape and without drafts.

Under the match rule the noise depends on (seed, row, position, token), not on the draft. The distribution of
the draws is tested in ``test_distribution.py``.
"""

import pytest
import torch
from helpers.models.tiny import SHAPES, ScriptedDrafter, generated, prompts, tiny_model

import specdec_ext
from specdec_ext import DraftModelDrafter, NgramDrafter

LENGTHS = (12, 3, 9, 5, 12)
WARPERS = {
    "plain": dict(top_k=0),
    "temperature": dict(temperature=0.7, top_k=0),
    "top-k": dict(top_k=5),
    "top-p": dict(top_k=0, top_p=0.8),
    "min-p": dict(top_k=0, min_p=0.1, temperature=1.3),
    "repetition-penalty": dict(top_k=0, repetition_penalty=1.3),
}


def sample(model, drafter, ids, mask, **kwargs):
    kwargs = {"max_new_tokens": 20, "do_sample": True, "seed": 11, **kwargs}
    return specdec_ext.generate(model, ids, attention_mask=mask, drafter=drafter, **kwargs)


@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
def test_text_does_not_depend_on_the_draft(name, warper):
    model = tiny_model(name)
    ids, mask = prompts(LENGTHS)
    expected = sample(model, None, ids, mask, **WARPERS[warper])
    drafters = [ScriptedDrafter(generated(expected, ids.shape[1]), shape) for shape in SHAPES]
    drafters += [NgramDrafter(min_ngram=1), NgramDrafter(16, 1, 4, 4), DraftModelDrafter(model)]
    for drafter in drafters:
        assert torch.equal(sample(model, drafter, ids, mask, **WARPERS[warper]), expected), drafter


def test_text_depends_on_the_seed():
    model = tiny_model("llama")
    ids, mask = prompts(LENGTHS)
    first = sample(model, "ngram", ids, mask, seed=1)
    assert torch.equal(first, sample(model, "ngram", ids, mask, seed=1))
    assert not torch.equal(first, sample(model, "ngram", ids, mask, seed=2))


def test_torch_manual_seed_determines_the_text():
    model = tiny_model("llama")
    ids, mask = prompts(LENGTHS)
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        texts.append(sample(model, "ngram", ids, mask, seed=None))
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], sample(model, "ngram", ids, mask, seed=None))


def test_generator_determines_the_text():
    model = tiny_model("llama")
    ids, mask = prompts(LENGTHS)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    texts = [sample(model, "ngram", ids, mask, seed=None, generator=each) for each in generators]
    assert torch.equal(*texts)


def test_rows_that_share_one_seed_have_different_noise():
    model = tiny_model("llama")
    ids, mask = prompts((5,) * 3)
    same = ids[:1].expand(3, -1)
    texts = sample(model, "ngram", same, mask, seed=4)
    assert len(set(map(tuple, texts.tolist()))) == 3
    assert torch.equal(texts[0], sample(model, None, same, mask, seed=[4, 5, 6])[0])


def test_sampling_with_top_k_1_is_greedy():
    model = tiny_model("llama")
    ids, mask = prompts(LENGTHS)
    greedy = sample(model, None, ids, mask, do_sample=False, seed=None)
    assert torch.equal(sample(model, "ngram", ids, mask, top_k=1), greedy)
