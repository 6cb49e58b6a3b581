"""Slow sweep (`make test-slow`): random batches, paddings, trees, samplers and stops, greedy and sampled.

Claim: the text is that of plain decoding with the package, and in greedy decoding that of Hugging Face's
``generate``.
"""

import random

import pytest
import torch
from helpers.models.tiny import (
    ARCHITECTURES,
    SHAPES,
    VOCAB,
    ScriptedDrafter,
    generated,
    prompts,
    tiny_model,
)

import specdec_ext
from specdec_ext import NgramDrafter

pytestmark = pytest.mark.slow


def random_call(rng):
    lengths = tuple(rng.randrange(1, 20) for _ in range(rng.randrange(1, 9)))
    ids, mask = prompts(lengths, seed=rng.randrange(10**6), side=rng.choice(["left", "right"]))
    kwargs = dict(attention_mask=mask, max_new_tokens=rng.randrange(1, 40), do_sample=False)
    if rng.random() < 0.5:
        kwargs["eos_token_id"] = rng.sample(range(VOCAB), 4)
    if rng.random() < 0.3:
        kwargs["repetition_penalty"] = 1.2
    if rng.random() < 0.3:
        kwargs["no_repeat_ngram_size"] = 3
    if rng.random() < 0.5:
        kwargs.update(do_sample=True, temperature=rng.choice([0.5, 1.0, 1.5]), top_k=0, seed=7)
    return ids, kwargs


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_calls_have_the_text_of_plain_decoding(name, seed):
    rng = random.Random(f"{name} {seed}")
    model = tiny_model(name)
    ids, kwargs = random_call(rng)
    expected = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    left_padded = bool(kwargs["attention_mask"][:, -1].all())
    if not kwargs["do_sample"] and left_padded:
        assert torch.equal(model.generate(ids, **kwargs), expected)
    answers = generated(expected, ids.shape[1])
    for drafter in (
        ScriptedDrafter(answers, rng.choice(SHAPES), seed),
        ScriptedDrafter(answers, rng.choice(SHAPES), seed),
        NgramDrafter(rng.randrange(1, 20), 1, rng.randrange(1, 8), rng.randrange(1, 5)),
    ):
        actual = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
        assert torch.equal(actual, expected), drafter
