"""Torch's default device changes no text: every tensor of the package is made with ``device=``.

The default device here is "meta", where tensors have no values.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.checks.lossless import DECODING, every_decoding
from helpers.drafters.every_drafter import DRAFTERS
from helpers.drafters.rope_cases import TYPES, config
from helpers.models.tiny import BATCHES, prompts, tiny_model
from helpers.texts.stopping_cases import letters_tokenizer
from torch.utils._device import _device_constructors

import specdec_ext
from specdec_ext.heads.rope import rope_tables

PACKAGE = Path(specdec_ext.__file__).parent
CREATORS = {function.__name__ for function in _device_constructors()}
KEYWORDS: dict[str, dict] = {
    "plain": {},
    "filters": {"top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "text": {"repetition_penalty": 1.3, "output_scores": True, "output_hidden_states": True},
    "memory": {"guidance_scale": 1.5},
}


FEW_DRAFTERS = ("ngram and model", "suffix and medusa")
CASES = [
    (name, keywords)
    if keywords == "plain" or name in FEW_DRAFTERS
    else pytest.param(name, keywords, marks=pytest.mark.slow)
    for keywords in KEYWORDS
    for name in DRAFTERS
]


@contextmanager
def on_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def creations(path: Path) -> Iterator[str]:
    """Calls that make a tensor on the default device."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "torch"
            and node.func.attr in CREATORS
            and not any(keyword.arg == "device" for keyword in node.keywords)
        ):
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_is_made_with_its_device():
    assert {"tensor", "zeros", "arange", "randint", "as_tensor"} <= CREATORS
    found = [line for path in PACKAGE.rglob("*.py") for line in creations(path)]
    assert not found, "\n".join(["without device=:", *found])


@every_decoding
@pytest.mark.parametrize(("name", "keywords"), CASES)
def test_text_does_not_depend_on_the_default_device(name, keywords, decoding):
    ids, mask = prompts(BATCHES["five-ragged"])
    kwargs = {**DECODING[decoding], **KEYWORDS[keywords], "attention_mask": mask}
    sampled = (
        "sampled" in name and keywords != "memory"
    )  # verification="rejection" refuses "memory"
    kwargs["verification"] = "rejection" if sampled else "match"
    model, drafters = tiny_model("llama"), [DRAFTERS[name]() for _ in range(2)]
    expected = specdec_ext.generate(model, ids, drafter=drafters[0], max_new_tokens=16, **kwargs)
    with on_meta():
        actual = specdec_ext.generate(model, ids, drafter=drafters[1], max_new_tokens=16, **kwargs)
    assert actual.tolist() == expected.tolist()


class Collector:
    """A streamer that keeps all values that it receives."""

    def __init__(self):
        self.values = []

    def put_drafted(self, tokens, drafted):
        self.values.append((tokens.tolist(), drafted.tolist()))

    def put(self, tokens):
        self.values.append(tokens.tolist())

    def end(self):
        self.values.append("end")


def test_streamed_text_does_not_depend_on_the_default_device():
    ids, tokenizer = prompts((9, 9))[0], letters_tokenizer()

    def run():
        streamer = Collector()
        kwargs = dict(stop_strings=["bcc", "i"], tokenizer=tokenizer, streamer=streamer)
        kwargs |= dict(drafter="ngram", max_new_tokens=40, do_sample=False)
        return specdec_ext.generate(tiny_model("llama"), ids, **kwargs).tolist(), streamer.values

    expected = run()
    with on_meta():
        actual = run()
    assert actual == expected


@pytest.mark.parametrize("kind", TYPES)
def test_rope_tables_do_not_depend_on_the_default_device(kind):
    expected = rope_tables(config(kind), 40)
    with on_meta():
        actual = rope_tables(config(kind), 40)
    assert all(map(torch.equal, actual, expected))
