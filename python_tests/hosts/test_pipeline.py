"""transformers' ``pipeline("text-generation")`` with our hook or an installed model is the plain one.

Claim: equal output, greedy, on the bundled model and its tokenizer, with drafts that are partly right;
sampled output does not depend on the drafter.
"""

import functools

import pytest
from helpers.texts.chats import TEMPLATE
from transformers import TextStreamer, pipeline

import specdec_ext
from specdec_ext import assets

CHAT = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "def add(a, b):"},
]
PREFILLED = [*CHAT, {"role": "assistant", "content": "def add(a, b):\n    return"}]
TEXTS = ["import os\nimport sys\n\n\ndef main(", "class Stack:\n    def __init__(self"]
INPUTS = {
    "text": TEXTS[0],
    "texts": TEXTS,
    "chat": CHAT,
    "chats": [CHAT, CHAT[1:]],
    "prefilled-chat": PREFILLED,
}


@functools.cache
def pipe():
    tokenizer = assets.load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    made = pipeline("text-generation", model=assets.load_target(), tokenizer=tokenizer)
    made.model.generation_config.max_length = None
    return made


def hook(**kwargs):
    """A drafter with the bundled draft model, which is right most of the time."""
    drafter = specdec_ext.DraftModelDrafter(assets.load_draft())
    return specdec_ext.custom_generate(drafter, **kwargs)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("inputs", INPUTS)
def test_hook_gives_the_output_of_the_pipeline(inputs, batch_size):
    kwargs = dict(max_new_tokens=10, do_sample=False, batch_size=batch_size)
    expected = pipe()(INPUTS[inputs], **kwargs)
    assert pipe()(INPUTS[inputs], custom_generate=hook(), **kwargs) == expected


def test_other_outputs_are_those_of_the_pipeline():
    for kwargs in (
        dict(return_full_text=False),
        dict(return_tensors=True),
        dict(repetition_penalty=1.3),
        dict(prefix="# a file\n"),
    ):
        kwargs = dict(max_new_tokens=8, do_sample=False, **kwargs)
        expected = pipe()(TEXTS[0], **kwargs)
        assert pipe()(TEXTS[0], custom_generate=hook(), **kwargs) == expected


def test_stop_sequences_go_to_the_hook():
    """The pipeline passes stop strings and the tokenizer to transformers, whose hook drops the tokenizer."""
    if "stop_strings" not in pipe()._sanitize_parameters(stop_sequence="\n")[1]:
        pytest.skip("pipelines of this transformers make a stop sequence an end-of-sequence id")
    kwargs = dict(max_new_tokens=20, do_sample=False)
    expected = pipe()(TEXTS[1], stop_sequence="\n", **kwargs)
    stopping = hook(stop_strings="\n", tokenizer=pipe().tokenizer)
    assert pipe()(TEXTS[1], custom_generate=stopping, **kwargs) == expected
    assert expected[0]["generated_text"].endswith("\n") or ":\n" in expected[0]["generated_text"]


def streamed(pieces, **kwargs):
    """The text that a streamer receives, and the pipeline's output."""
    streamer = TextStreamer(pipe().tokenizer, skip_prompt=True)
    streamer.on_finalized_text = lambda text, stream_end=False: pieces.append(text)
    return pipe()(TEXTS[0], streamer=streamer, max_new_tokens=12, do_sample=False, **kwargs)


def test_installed_models_stream_and_stop():
    """The hook silently drops the streamer; an installed model uses it."""
    plain, ours = [], []
    expected = streamed(plain)
    model, drafter = pipe().model, specdec_ext.DraftModelDrafter(assets.load_draft())
    with specdec_ext.install(model, drafter):
        assert streamed(ours) == expected
        stopped = pipe()(TEXTS[1], stop_sequence="\n", max_new_tokens=20, do_sample=False)
    assert plain and "".join(ours) == "".join(plain)
    assert pipe()(TEXTS[1], stop_sequence="\n", max_new_tokens=20, do_sample=False) == stopped


@pytest.mark.parametrize("inputs", INPUTS)
def test_installed_model_gives_the_output_of_the_pipeline(inputs):
    kwargs = dict(max_new_tokens=10, do_sample=False)
    expected = pipe()(INPUTS[inputs], **kwargs)
    with specdec_ext.install(pipe().model):
        assert pipe()(INPUTS[inputs], **kwargs) == expected


def test_sampled_output_does_not_depend_on_the_drafter():
    kwargs = dict(max_new_tokens=8, do_sample=True, num_return_sequences=3)
    plain = specdec_ext.custom_generate(None, seed=5)
    expected = pipe()(TEXTS, custom_generate=plain, **kwargs)
    assert pipe()(TEXTS, custom_generate=hook(seed=5), **kwargs) == expected
