"""Tiny random models of every architecture that transformers maps to causal language models.

Most config fields mean the same in every family, so one table of names and sizes shrinks all configs.
``OVERRIDES`` has the additional settings of a family.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

ARCHITECTURES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 97
LAYERS = 4
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 64, 4, 2, 16, 4
# The scores of an indexer are sums of rectified terms over its heads. With few heads many are zero and tie.
INDEX_HEADS = 16
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
REACHED = 8  # texts exceed windows, chunks and top-k of this size within a few tokens
UNREACHED = 256

# Sizes of config fields by pattern of their names. The first match decides; smaller defaults stay.
SIZES = {
    r".*vocab(_size)?(_per_layer_input)?": VOCAB,
    r"(num_|n_)?(hidden_|decoder_|encoder_)?layers?|num_blocks|depth": LAYERS,
    r"(.*_)?window(_size|_len)?|sliding_window_size|(mamba_|attention_)?chunk_size|local_attention"
    r"|index_topk|indexer_budget": REACHED,
    r"index_block_size|index_topk_blocks": 2,
    r"(original_)?max_position_embeddings|max_(seq_len|target_positions)|n_positions|n_ctx": UNREACHED,
    r"(attention_|output_)?(hidden|embedding)_size(_global)?|d_model|n_embd|emb(edding)?_dim"
    r"|word_embed_proj_dim|lru_width|.*_embed_dim": HIDDEN,
    r"hidden_size_per_layer_input|.*_(lora_|dt_)?rank|hc_lowrank": 16,
    r"(.*_)?(intermediate|hidden)_size(_mlp)?|(.*_)?ff(n|_)?(_hidden)?_?(dim|size)|n_inner|dff|dim_ff"
    r"|d_inner|mamba_d_ssm": 2 * HIDDEN,
    r"(.*_)?(key_value|kv|key)(_n)?_heads": KV_HEADS,
    r"(n_mamba|mamba_n|mamba_num)_heads": 2 * HEADS,
    r"rotary_dim": HEAD_DIM // 2,
    r"(?!qk_head_dim)((.*_)?(d_head|head_?dim|dim_head)|kv_channels|d_kv|attention_head_size)": HEAD_DIM,
    r"index_n_heads": INDEX_HEADS,
    r"(.*_)?heads?(_per_layer)?": HEADS,
    r"num_experts_per_tok(en)?|top_k_experts|moe_(top_?)?k|n_group|num_expert_group": 2,
    r"(.*_)?experts|zero_expert_num": EXPERTS,
    r"topk_group": 1,
    r"(.*_)?(state_size|d_state)|n_groups": 8,
}


def build(name: str) -> PreTrainedModel:
    """Build a model of ``ARCHITECTURES`` or ``VARIANTS`` in float32, always with the same weights."""
    return build_with(*VARIANTS.get(name, (name, {})), seed=sum(map(ord, name)))


def build_with(kind: str, extra: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Build a model of a type of ``ARCHITECTURES`` with these fields in its config."""
    fields = shrunk(AutoConfig.for_model(kind), OVERRIDES.get(kind, {}))
    config = AutoConfig.for_model(kind, **{**fields, **extra})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(getattr(config, "decoder", None), PreTrainedConfig):
            # musicgen: the config describes an encoder-decoder, the mapping names its decoder
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config.decoder)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        spread(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def shrunk(default: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``default`` to change; configs inside it become dictionaries."""
    changed: dict[str, Any] = {}
    fields = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    layers = getattr(default, "num_hidden_layers", None)
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            changed[name] = {
                "model_type": value.model_type,
                **shrunk(value, overrides.get(name, {})),
            }
        elif isinstance(value, list | tuple) and len(value) == layers:
            changed[name] = condensed([tiny_size(name, each) or each for each in value])
        elif name.endswith("_token_id"):
            if name in SPECIAL_TOKENS and isinstance(value, int | list):
                changed[name] = SPECIAL_TOKENS[name]
        elif tiny_size(name, value) is not None:
            changed[name] = tiny_size(name, value)
    if "is_decoder" in fields:  # otherwise BERT and similar models see later tokens
        changed["is_decoder"] = True
    # With tied weights, a token predicts itself.
    if fields.get("tie_word_embeddings"):
        changed["tie_word_embeddings"] = False
    # Attention without shared keys stays so; MLA requires it.
    if fields.get("num_key_value_heads") and (
        fields["num_key_value_heads"] == fields.get("num_attention_heads")
    ):
        changed["num_key_value_heads"] = changed.get("num_attention_heads")
    for name, value in overrides.items():
        nested = isinstance(fields.get(name), PreTrainedConfig)
        changed[name] = {**changed[name], **value} if nested else value
    return changed


def condensed(per_layer: list[Any]) -> list[Any]:
    """Cycle through the distinct values until there is one for every layer."""
    kinds = [value for i, value in enumerate(per_layer) if value not in per_layer[:i]]
    return [kinds[i % len(kinds)] for i in range(LAYERS)]


def tiny_size(field: str, default: Any) -> int | None:
    """The size that replaces this default, or None if the default stays."""
    if isinstance(default, bool) or not isinstance(default, int):
        return None
    size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, field)), default)
    return size if size < default else None


@torch.no_grad()
def spread(model: PreTrainedModel) -> None:
    """Set random weights that are large enough for tokens to differ and greedy text to vary.

    Parameters that models do not fill with small random numbers (norms, decays) are kept unless they are
    zero. Zeros make ties and hide what they are multiplied by.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, torch.nn.Embedding):
                parameter.normal_()
            elif isinstance(module, Conv1D) and parameter.ndim == 2:
                spread_projection(parameter.T)
            elif not parameter.any():
                parameter.normal_(std=0.1)
            elif parameter.ndim >= 2 and 0 < parameter.std() < 0.2:
                spread_projection(parameter)
    model.tie_weights()


def spread_projection(weight: Tensor) -> None:
    """Fill with random numbers scaled by fan-in, in rows that sum to zero.

    Activations such as GELU add a mean that all inputs share, and rows that sum to zero ignore it. Otherwise
    a deep random model predicts the same token for every input.
    """
    weight.normal_(std=2.0 * weight.shape[-1] ** -0.5)
    weight -= weight.mean(dim=-1, keepdim=True)


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
_DOTS3_WINDOWS = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 48,
    "swa_qk_nope_head_dim": 32,
    "swa_v_head_dim": HEAD_DIM,
}
_INDEXER = {
    "indexer_n_heads": INDEX_HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": REACHED,
    "indexer_compress_ratio": 2,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    **{
        name: {"is_decoder": False} for name in ("gpt_neox", "gpt_neox_japanese")
    },  # as in checkpoints
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": LAYERS},
    "blt": {"num_hidden_layers": LAYERS},  # the config of its caches lacks the number
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {**_ROPE, "mrope_section": [2, 3, 3]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "qk_rope_head_dim": 8,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    # Beyond its window it keeps the best of nearly equal tokens.
    "doge": {"keep_window_size": UNREACHED},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": _MOE,
    "dots3_note_text": _DOTS3_WINDOWS,
    "dots3_note": {
        "text_config": _DOTS3_WINDOWS,
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "falcon_h1": {"mamba_d_head": HEAD_DIM},
    "gemma4": {"text_config": {"global_head_dim": 2 * HEAD_DIM}},
    "gemma4_text": {"global_head_dim": 2 * HEAD_DIM},
    "gemma4_unified": {"text_config": {"global_head_dim": 2 * HEAD_DIM}},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD_DIM},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "granitemoe_swa": {"shared_intermediate_size": HIDDEN},
    "granitemoeshared": {"shared_intermediate_size": HIDDEN},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": EXPERTS, "moe_topk": 2},
    "inkling_text": {"logits_mup_width_multiplier": 1.0, "log_scaling_n_floor": UNREACHED},
    "inkling2_text": {"log_scaling_n_floor": UNREACHED},
    "inkling2_loop_text": {
        "log_scaling_n_floor": UNREACHED,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4": {"text_config": {"floor_scale": REACHED}},
    "llama4_text": {"floor_scale": REACHED},
    "mamba2": {"num_heads": 2 * HEADS},
    "ministral": {"head_dim": HEAD_DIM},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "mpt": {"use_cache": True},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "axial_pos_shape": (16, 16),
        "axial_pos_embds_dim": (16, 48),
        "local_attn_chunk_length": REACHED,
        "lsh_attn_chunk_length": REACHED,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "xlm": {"mask_token_id": 3},
    "xlstm": {"hidden_size": 2 * HIDDEN, "embedding_dim": 2 * HIDDEN},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD_DIM},
    "zamba2": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
        "hybrid_layer_ids": [1, 3],
    },
}

# Further models, which cover what the defaults of their architecture leave out.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert+encoder": ("bert", {"is_decoder": False}),  # sees later tokens
    "falcon+alibi": ("falcon", {"alibi": True}),
    "gemma4_text+shared": ("gemma4_text", {"num_kv_shared_layers": 2}),
    "inkling_text+scaled": ("inkling_text", {"log_scaling_n_floor": REACHED}),
    "kolibri1+full": ("kolibri1", {"sliding_window": UNREACHED}),
    "moshi+full": ("moshi", {"sliding_window": UNREACHED}),
    "mpt+uncached": ("mpt", {"use_cache": False}),
    "qwen2+window": (
        "qwen2",
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
}
VARIANTS = {name: variant for name, variant in VARIANTS.items() if variant[0] in ARCHITECTURES}
