"""Targets with MTP layers, and transformers' own drafts with them."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.models.tiny import random_model, tiny_model
from transformers import PreTrainedModel

from specdec_ext import MtpHeads
from specdec_ext.heads.config import DraftHead
from specdec_ext.models.compat import MtpModel
from specdec_ext.training.start import new_head

needs_mtp = pytest.mark.skipif(MtpModel is None, reason="transformers has no MtpModel before 5.23")

_EXPERTS = dict(
    n_routed_experts=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
_LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    num_key_value_heads=4,
)  # fmt: skip
_WINDOWS = dict(
    sliding_window=8,
    head_dim=8,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
)
# Seeds of layers that are right about some tokens; of other models 0.
_SEEDS = {"deepseek_v3": 7, "mellum": 5}
# Name -> model type and config; the number is that of the MTP layers.
CONFIGS: dict[str, tuple[str, dict]] = {
    "glm4_moe-1": ("glm4_moe", _EXPERTS),
    "glm4_moe-3": ("glm4_moe", _EXPERTS),
    "deepseek_v3-1": ("deepseek_v3", {**_EXPERTS, **_LATENT}),
    "deepseek_v3-2": ("deepseek_v3", {**_EXPERTS, **_LATENT}),
    "mellum-1": ("mellum", {**_EXPERTS, **_WINDOWS}),
}


@functools.cache
def mtp_target(name: str) -> PreTrainedModel:
    """A target whose text has five tokens, so that many guesses of :func:`mtp_model` are right."""
    kind, overrides = CONFIGS[name]
    layers = int(name.rpartition("-")[2])
    model = random_model(kind, 1, num_nextn_predict_layers=layers, **overrides)
    model.lm_head.weight.data[5:] = 0
    return model


def mtp_model(model: PreTrainedModel, num_layers: int | None = None):
    """transformers' ``MtpModel`` of a target, with random weights."""
    config = model.config
    count = num_layers or config.num_mtp_layers
    given = {"num_mtp_layers": count, "mtp_layer_types": ["full_attention"] * count}
    added = {name: value for name, value in given.items() if not hasattr(config, name)}
    for name, value in added.items():
        setattr(config, name, value)
    try:
        mtp = MtpModel(model, count).eval()
    finally:
        for name in added:
            delattr(config, name)
    generator = torch.Generator().manual_seed(_SEEDS.get(config.model_type, 0))
    for tensor in mtp.layers.state_dict().values():
        if tensor.ndim == 1:
            tensor.fill_(1.0)
        else:
            values = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(values * 2.0 * tensor.shape[-1] ** -0.5)
    return mtp.to(model.dtype)


def llama_heads(model: PreTrainedModel | None = None) -> MtpHeads:
    """One MTP layer of a tiny Llama, by default of that in float32."""
    model = tiny_model("llama") if model is None else model
    return MtpHeads(model, mtp_model(model, 1))


def draft_head_of(model: PreTrainedModel, mtp) -> DraftHead:
    """The same layer as a head for the op ``draft_head``; the target is a Llama or a Qwen3."""
    config, stored = new_head(model, kind="mtp").config, mtp.layers[0].state_dict()
    tensors = {name: stored[_transformers_name(name)] for name in config.tensor_shapes()}
    return DraftHead(config, {name: t.detach().clone() for name, t in tensors.items()})


def mtp_model_of(model: PreTrainedModel, head: DraftHead):
    """transformers' ``MtpModel`` of a target with the weights of a head for the op ``draft_head``."""
    mtp = mtp_model(model, 1)
    mtp.layers[0].load_state_dict(
        {_transformers_name(name): tensor for name, tensor in head.tensors.items()}
    )
    return mtp


def _transformers_name(name: str) -> str:
    outside = {
        "embedding_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "fc.weight": "eh_proj.weight",
        "norm.weight": "post_norm.weight",
    }
    return outside.get(name) or name.replace("layers.0.", "mtp_block.")
