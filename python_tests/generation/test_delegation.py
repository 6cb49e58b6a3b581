"""Models with a ``generate`` of their own: the package's loop runs inside it, or an error says why not."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import zoo
from helpers.models.tiny import prompts, tiny_model
from helpers.versions import since
from transformers import LlamaForCausalLM

import specdec_ext
from specdec_ext.errors import NotAcceleratedError


def of_class(cls):
    """The tiny Llama as one of ``cls``."""
    model = copy.deepcopy(tiny_model("llama"))
    model.__class__ = cls
    return model


class NoHook(LlamaForCausalLM):
    def generate(self, input_ids, **kwargs):
        return input_ids


class Ignores(LlamaForCausalLM):
    def generate(self, input_ids, custom_generate=None, **kwargs):
        return super().generate(input_ids, **kwargs)


class OwnLoop(LlamaForCausalLM):
    def _sample(self, *args, **kwargs):
        raise AssertionError("the loop of transformers must not run")


class Delegates(LlamaForCausalLM):
    def generate(self, sounds, **kwargs):
        return super().generate(inputs=sounds, **kwargs)


@pytest.mark.parametrize("cls", [NoHook, Ignores])
def test_generate_without_the_hook_is_refused(cls):
    ids, _ = prompts((5,))
    message = rf"{cls.__name__}\.generate .* use model\.generate"
    with pytest.raises(NotAcceleratedError, match=message):
        specdec_ext.generate(of_class(cls), ids, max_new_tokens=2, do_sample=False)


def test_decoding_loop_of_the_model_is_refused():
    model, (ids, _) = of_class(OwnLoop), prompts((5,))
    kwargs = {"max_new_tokens": 2, "do_sample": False}
    with pytest.raises(NotAcceleratedError, match="OwnLoop has its own decoding loop"):
        specdec_ext.generate(model, ids, **kwargs)
    with pytest.raises(NotAcceleratedError, match="OwnLoop has its own decoding loop"):
        model.generate(ids, custom_generate=specdec_ext.custom_generate(), **kwargs)


def test_first_parameter_may_have_another_name():
    model, (ids, _) = of_class(Delegates), prompts((5,))
    kwargs = {"max_new_tokens": 4, "do_sample": False}
    text = specdec_ext.generate(model, sounds=ids, **kwargs)
    assert torch.equal(text, tiny_model("llama").generate(ids, **kwargs))


@since("5.23", "Musicgen's config has parts by default")
def test_models_of_codebooks_are_refused():
    ids, _ = prompts((4,))
    message = r"MusicgenForCausalLM\.generate has its own decoding loop"
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(zoo.build("musicgen"), ids, max_new_tokens=2)
