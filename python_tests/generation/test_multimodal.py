"""Models that see or hear: after an image the text of ``model.generate``, whatever is drafted."""

from __future__ import annotations

import copy

import multimodal_zoo as zoo
import pytest
import torch
from tiny import SHAPES, ScriptedDrafter, generated, oracle_tree

import specdec_ext

NEW_TOKENS = 8
# Plain positions, positions of three axes, recurrent states, attention of both directions within an image,
# a cache that holds the image.
SOME = ["llava", "qwen2_vl", "qwen3_5", "gemma3", "mllama"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is decoded without speculation in a batch")
EVERY_KIND = [
    name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in zoo.KINDS
]


def check(name, inputs):
    """Every scripted drafter gives what transformers gives; how much of the oracle's tree was accepted."""
    model = zoo.build(name)
    kwargs = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**kwargs)
    answers = generated(expected, inputs["input_ids"].shape[1])
    accepted = {}
    for shape in SHAPES:
        output = specdec_ext.generate(
            model, drafter=ScriptedDrafter(answers, shape), return_dict_in_generate=True, **kwargs
        )
        assert torch.equal(output.sequences, expected), shape.__name__
        accepted[shape] = output.speculation_stats.accepted_tokens
    return accepted[oracle_tree], expected


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("rows", [1, 2])
def test_image_in_the_prompt(name, rows):
    inputs = zoo.media_prompt(name, rows)
    support = specdec_ext.supports(zoo.build(name), inputs)
    accepted, text = check(name, inputs)
    if support.batch or (support.tree and rows == 1):
        assert accepted > rows * NEW_TOKENS // 2
    else:
        assert support.reasons
    # The image counts.
    media = {key: -3 * value for key, value in inputs.items() if value.is_floating_point()}
    other = zoo.build(name).generate(
        **{**inputs, **media}, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert not torch.equal(other, text)


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("rows", [1, 2])
def test_text_alone(name, rows):
    if name == "blip-2":
        pytest.skip("generate of BLIP-2 insists on an image")
    accepted, _ = check(name, zoo.text_prompt(rows))
    if specdec_ext.supports(zoo.build(name)).tree:
        assert accepted > rows * NEW_TOKENS // 2


def test_end_of_one_row_and_seeds():
    """Rows that end early change the batch, not the positions of the others."""
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


def test_verdicts_of_calls():
    model = zoo.build("llava")
    assert specdec_ext.supports(model, zoo.media_prompt("llava", 1)).tree
    verdict = specdec_ext.supports(zoo.build("mllama"), zoo.media_prompt("mllama", 1))
    assert verdict.chain and not verdict.batch
    assert verdict.reasons == ("its passes after the prompt need cross_attention_mask",)


def test_second_turn_with_another_image():
    """Behind a cache that holds text, transformers prepares every pass."""
    model = zoo.build("llava")
    inputs = zoo.media_prompt("llava", 1)
    first = specdec_ext.generate(
        model,
        **inputs,
        drafter="ngram",
        max_new_tokens=4,
        do_sample=False,
        suppress_tokens=[zoo.MEDIA],
        return_dict_in_generate=True,
    )
    ids = torch.cat([first.sequences, inputs["input_ids"]], dim=1)
    kwargs = {
        "input_ids": ids,
        "pixel_values": 2 * inputs["pixel_values"],
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "suppress_tokens": [zoo.MEDIA],
    }
    caches = [copy.deepcopy(first.past_key_values) for _ in range(len(SHAPES) + 1)]
    expected = model.generate(**kwargs, past_key_values=caches.pop())
    for shape, cache in zip(SHAPES, caches, strict=True):
        drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
        text = specdec_ext.generate(model, **kwargs, drafter=drafter, past_key_values=cache)
        assert torch.equal(text, expected)


def test_refuses_what_would_be_read_wrongly():
    model, inputs = zoo.build("llava"), zoo.media_prompt("llava", 1)
    with pytest.raises(ValueError, match=r"prefill_chunk_size=4 .*mm_encoder_outputs"):
        specdec_ext.generate(model, **inputs, prefill_chunk_size=4, max_new_tokens=2)
    inputs = zoo.media_prompt("llava", 2)
    inputs = {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}
    with pytest.raises(ValueError, match="pad on the left"):
        specdec_ext.generate(model, **inputs, max_new_tokens=2)
