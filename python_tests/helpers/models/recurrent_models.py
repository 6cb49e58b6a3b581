"""Tiny recurrent and hybrid models."""

from __future__ import annotations

import functools

import torch
from helpers.models.tiny import SIZES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

KINDS: dict[str, dict] = {
    "mamba": dict(state_size=8, intermediate_size=64),
    "mamba2": dict(num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=4),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"], conv_L_cache=3),
    "qwen3_next": dict(layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32),
    "falcon_h1": dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        mamba_chunk_size=8),
}  # fmt: skip


@functools.cache
def recurrent_models() -> dict[str, PreTrainedModel]:
    """A model of every kind, with weights scaled by fan-in."""
    made = {}
    for kind, overrides in KINDS.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**SIZES, **overrides})
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2 and min(parameter.shape) > 8:
                    parameter.normal_(std=2.0 * parameter.shape[-1] ** -0.5)
        model.generation_config.eos_token_id = None
        made[kind] = model
    return made
