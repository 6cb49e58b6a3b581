"""The models of the zoo are what the sweeps over them take for granted."""

from __future__ import annotations

import pytest
import torch
from helpers.models import zoo
from transformers import AutoConfig, PreTrainedConfig

SOME = ["bamba", "deepseek_v4", "gemma3", "gpt2", "nemotron_h", "qwen3_next", "whisper"]


def layer_kinds(config: PreTrainedConfig) -> set[str]:
    return set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


@pytest.mark.parametrize("name", SOME)
def test_always_the_same_weights(name):
    first, second = (dict(zoo.build(name).named_parameters()) for _ in range(2))
    for parameter, values in first.items():
        assert torch.equal(values, second[parameter]), parameter
        assert values.dtype == torch.float32 and values.isfinite().all(), parameter


@pytest.mark.parametrize("name", SOME)
def test_small_with_every_kind_of_layer(name):
    model = zoo.build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6
    assert layer_kinds(model.config) >= layer_kinds(AutoConfig.for_model(name))


def test_names_of_variants_tell_their_architecture():
    for name, (kind, _) in zoo.VARIANTS.items():
        assert kind in zoo.ARCHITECTURES and name.startswith(f"{kind}+")
