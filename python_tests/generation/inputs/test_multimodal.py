"""Models that read images or sounds have the text of ``model.generate`` with every draft."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import multimodal_zoo as zoo
from helpers.models.tiny import SHAPES, ScriptedDrafter, generated, oracle_tree

import specdec_ext

NEW_TOKENS = 8
# Plain positions, positions of three axes, recurrent states, bidirectional attention within an image, a cache
# that holds the image.
SOME = ["llava", "qwen2_vl", "qwen3_5", "gemma3", "mllama"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is decoded without speculation in a batch")
EVERY_KIND = [
    name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in zoo.KINDS
]


def check(name, inputs):
    """Check that scripted drafters give the text of transformers; (tokens accepted of the right tree,
    text)."""
    model = zoo.build(name)
    kwargs = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**kwargs)
    answers = generated(expected, inputs["input_ids"].shape[1])
    accepted = {}
    for shape in SHAPES:
        options = dict(kwargs, drafter=ScriptedDrafter(answers, shape))
        output = specdec_ext.generate(model, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, expected), shape.__name__
        accepted[shape] = output.speculation_stats.accepted_tokens
    return accepted[oracle_tree], expected


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("rows", [1, 2])
def test_prompt_with_an_image_has_the_text_of_transformers(name, rows):
    inputs = zoo.media_prompt(name, rows)
    support = specdec_ext.supports(zoo.build(name), inputs)
    accepted, text = check(name, inputs)
    if support.batch or (support.tree and rows == 1):
        assert accepted > rows * NEW_TOKENS // 2
    else:
        assert support.reasons
    # Another image gives another text.
    media = {key: -3 * value for key, value in inputs.items() if value.is_floating_point()}
    options = {**inputs, **media, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    other = zoo.build(name).generate(**options)
    assert not torch.equal(other, text)


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("rows", [1, 2])
def test_prompt_without_an_image_has_the_text_of_transformers(name, rows):
    if name == "blip-2":
        pytest.skip("generate of BLIP-2 needs an image")
    accepted, _ = check(name, zoo.text_prompt(rows))
    if specdec_ext.supports(zoo.build(name)).tree:
        assert accepted > rows * NEW_TOKENS // 2


def test_rows_that_end_early_and_seeds_have_the_text_of_plain_decoding():
    model = zoo.build("qwen2_vl")
    inputs = zoo.media_prompt("qwen2_vl", 2)
    columns = inputs["input_ids"].shape[1]
    text = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    for eos in (int(text[0, columns + 2]), int(text[1, columns + 1])):
        kwargs = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": eos}
        drafter = ScriptedDrafter(generated(text, columns), oracle_tree)
        output = specdec_ext.generate(model, drafter=drafter, **kwargs)
        assert torch.equal(output, model.generate(**kwargs))
    kwargs = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": True, "seed": 5}
    plain = specdec_ext.generate(model, drafter=None, **kwargs)
    for shape in SHAPES:
        drafter = ScriptedDrafter(generated(plain, columns), shape)
        assert torch.equal(specdec_ext.generate(model, drafter=drafter, **kwargs), plain)


def test_support_depends_on_the_inputs():
    model = zoo.build("llava")
    assert specdec_ext.supports(model, zoo.media_prompt("llava", 1)).tree
    verdict = specdec_ext.supports(zoo.build("mllama"), zoo.media_prompt("mllama", 1))
    assert verdict.chain and not verdict.batch
    assert verdict.reasons == ("its passes after the prompt need cross_attention_mask",)


def test_second_turn_with_another_image_has_the_text_of_transformers():
    """If the cache holds text, transformers prepares every pass."""
    model = zoo.build("llava")
    inputs = zoo.media_prompt("llava", 1)
    common = dict(do_sample=False, suppress_tokens=[zoo.MEDIA])
    kwargs = dict(common, max_new_tokens=4, return_dict_in_generate=True)
    first = specdec_ext.generate(model, **inputs, drafter="ngram", **kwargs)
    ids = torch.cat([first.sequences, inputs["input_ids"]], dim=1)
    kwargs = dict(common, input_ids=ids, max_new_tokens=NEW_TOKENS)
    kwargs["pixel_values"] = 2 * inputs["pixel_values"]
    caches = [copy.deepcopy(first.past_key_values) for _ in range(len(SHAPES) + 1)]
    expected = model.generate(**kwargs, past_key_values=caches.pop())
    for shape, cache in zip(SHAPES, caches, strict=True):
        drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
        text = specdec_ext.generate(model, **kwargs, drafter=drafter, past_key_values=cache)
        assert torch.equal(text, expected)


def test_chunks_and_right_paddings_are_refused():
    model, inputs = zoo.build("llava"), zoo.media_prompt("llava", 1)
    with pytest.raises(ValueError, match=r"prefill_chunk_size=4 .*mm_encoder_outputs"):
        specdec_ext.generate(model, **inputs, prefill_chunk_size=4, max_new_tokens=2)
    inputs = zoo.media_prompt("llava", 2)
    inputs = {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}
    with pytest.raises(ValueError, match="pad on the left"):
        specdec_ext.generate(model, **inputs, max_new_tokens=2)
