"""A Gemma-4 target and its assistant, with random weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from helpers.models import zoo
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec_ext.models.compat import sharing_all_keys

# Name of a target -> model type of its assistant, and number of its layers that share keys.
ASSISTANTS = {"gemma4_text": "gemma4_assistant", "gemma4_unified_text": "gemma4_unified_assistant"}
AVAILABLE = set(ASSISTANTS.values()) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW = zoo.REACHED
# Tokens that target and assistant emit: so few that many guesses are right.
EMITTED = 3


@functools.cache
def target(name: str = "gemma4_text", shared: int = 2) -> PreTrainedModel:
    """A target whose last ``shared`` layers have no keys of their own.

    transformers 5.23.0 can't run gemma4_unified_text with shared keys, unless it returns hidden states.
    """
    model = zoo.build_with(name, {"num_kv_shared_layers": shared}, seed=3)
    model.lm_head.weight.data[EMITTED:] *= 0.01  # not 0: equal logits have no order
    return model


@functools.cache
def assistant(name: str = "gemma4_text", **fields: Any) -> PreTrainedModel:
    """An assistant for :func:`target`, with two layers; ``fields`` are those of its config."""
    kind = ASSISTANTS[name]
    of_target = target(name).config
    text = {
        "model_type": f"{kind.removesuffix('_assistant')}_text",
        "vocab_size": zoo.VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": zoo.HEADS,
        "num_key_value_heads": zoo.KV_HEADS,
        "head_dim": zoo.HEAD_DIM,
        "global_head_dim": 2 * zoo.HEAD_DIM,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": zoo.UNREACHED,
        "tie_word_embeddings": False,
    }
    given = {"backbone_hidden_size": of_target.hidden_size, "tie_word_embeddings": False, **fields}
    config = AutoConfig.for_model(kind, text_config=text, **given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        with sharing_all_keys():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        zoo.spread(model)
        if model.masked_embedding is not None:
            ordering = model.masked_embedding.token_ordering
            ordering.copy_(torch.randperm(len(ordering)))
    model.lm_head.weight.data[EMITTED:] *= 0.01
    return model.eval()
