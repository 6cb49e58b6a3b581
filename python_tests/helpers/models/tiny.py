"""Tiny random models, prompts and scripted drafters."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import specdec_ext
from specdec_ext import DraftTree

VOCAB = 97
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
# name -> (model type, config overrides); texts exceed the windows within a few tokens
CONFIGS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 64}),
    "gemma2-window": ("gemma2", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3-window": ("gemma3_text", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8,
        "num_hidden_layers": 6}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
}  # fmt: skip
ARCHITECTURES = list(CONFIGS)
_DECODER = dict(
    d_model=32,
    is_decoder=True,
    is_encoder_decoder=False,
    **{
        f"{part}_{size}": value
        for part in ("encoder", "decoder")
        for size, value in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 64))
    },
)
_SPARSE = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=32,
    index_topk=8,
    index_n_heads=2,  # few heads: many scores are rectified to zero and tie
    index_head_dim=16,
)
# Decoders that compute positions themselves.
COUNTING: dict[str, tuple[str, dict]] = {
    name: (name, _DECODER)
    for name in (
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "mvp",
        "pegasus",
        "plbart",
        "trocr",
    )
} | {
    "trocr-sinusoidal": ("trocr", {**_DECODER, "use_learned_position_embeddings": False}),
    "whisper": ("whisper", {**_DECODER, "max_target_positions": 128}),
    "roformer": ("roformer", {"is_decoder": True, "embedding_size": 32}),
}
# Attention with a bias or a cut-off by distance.
BY_DISTANCE: dict[str, tuple[str, dict]] = {
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128, "use_cache": True}),
    "falcon-alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False}),
    "gpt_neo-window": ("gpt_neo", {"attention_types": [[["global", "local"], 2]], "num_hidden_layers": 4,
        "num_heads": 4, "window_size": 6, "max_position_embeddings": 64}),
}  # fmt: skip
# Caches with more or fewer tensors than keys and values, or with windows of their own kind.
CACHES: dict[str, tuple[str, dict]] = {
    "deepseek_v32": ("deepseek_v32", {**_SPARSE, "first_k_dense_replace": 1}),
    "deepseek_v3": ("deepseek_v3", {**_SPARSE, "first_k_dense_replace": 1}),
    "minimax_m3": ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse",
        "minimax_m3_sparse"], "mlp_layer_types": ["dense"] * 3, "dense_intermediate_size": 64, "head_dim": 16,
        "index_block_size": 4, "index_topk_blocks": 2, "index_n_heads": 2, "index_head_dim": 16}),
    "gemma3n-shared": ("gemma3n_text", {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "intermediate_size": 64,
        "laurel_rank": 8, "altup_num_inputs": 2}),
    "llama4-chunks": ("llama4_text", {"attention_chunk_size": 8, "floor_scale": 4, "attn_scale": 0.5,
        "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "num_hidden_layers": 4}),
    "gpt_oss-sinks": ("gpt_oss", {"head_dim": 8, "sliding_window": 8, "num_local_experts": 2,
        "num_experts_per_tok": 1}),
    # Its parameter A is zero in a new model, so all tokens tie.
    "doge-keep": ("doge", {"keep_window_size": 8}),
    "moshi-window": ("moshi", {"sliding_window": 8, "ffn_dim": 64, "head_dim": 8}),
}  # fmt: skip
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
# Decoders that one op runs (the direct pass), beside some of those above.
DECODERS: dict[str, tuple[str, dict]] = {
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "gemma": ("gemma", {"head_dim": 8}),
    "phi3-window": ("phi3", {"sliding_window": 8}),
    "phi3-half": ("phi3", {"rope_parameters": _HALF}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5,
        "attention_multiplier": 0.2}),
    "olmo2": ("olmo2", {}),
    "olmo3-window": ("olmo3", {"sliding_window": 8, "num_hidden_layers": 4}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 8}),
    "gpt_neox": ("gpt_neox", {"rope_parameters": _HALF}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 8}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-window": ("qwen3_moe", {**_EXPERTS, "head_dim": 8, "num_experts_per_tok": 5,
        "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 8}),
    "gpt_neox-serial": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
}  # fmt: skip
CONFIGS |= COUNTING | BY_DISTANCE | CACHES | DECODERS
CONFIGS["gpt2-short"] = ("gpt2", {**CONFIGS["gpt2"][1], "max_position_embeddings": 32})


@functools.cache
def tiny_model(
    name: str, attn_implementation: str | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A random model of ``CONFIGS``."""
    kind, overrides = CONFIGS[name]
    seed = sum(map(ord, name))
    model = random_model(kind, seed, attn_implementation=attn_implementation, **overrides)
    return model.to(dtype)


def random_model(
    kind: str, seed: int = 0, *, attn_implementation: str | None = None, **overrides: Any
) -> PreTrainedModel:
    """A model whose greedy text is varied, because its weights are scaled by fan-in."""
    config = AutoConfig.for_model(kind, **{**SIZES, **overrides})
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or ".experts." in name:
                scale = 2.0 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def with_varied_vectors(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose norms and biases are not one and zero, so that they matter."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def model_without_layers() -> PreTrainedModel:
    """A new Llama whose attention and MLP add nothing: its logits depend on the last token alone."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@functools.cache
def counting_model() -> PreTrainedModel:
    """A Llama that continues n with n + 1: the logits look up the token."""
    model = model_without_layers()
    with torch.no_grad():
        embeddings = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=-1)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(embeddings.roll(1, dims=0))
    return model


def prompts(
    lengths: tuple[int, ...], seed: int = 0, side: str = "left"
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Return (input_ids, attention_mask) of random prompts with these lengths, padded with token 0."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        text = torch.randint(1, VOCAB, (length,), generator=generator)
        where = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, where], mask[row, where] = text, 1
    return ids, mask


class ScriptedDrafter(specdec_ext.Drafter):
    """Proposes paths that a function makes from the known continuation of each row.

    Args:
        answers: the right tokens to generate, per original row.
        shape: ``shape(right, rng) -> paths``; ``right`` are the next right tokens, if there are any.
    """

    def __init__(self, answers: list[list[int]], shape, seed: int = 0):
        self.answers, self.shape = answers, shape
        self.random = random.Random(seed)

    def propose(self, context):
        paths = []
        for row in context.rows:
            done = len(context.generated[row])
            paths.append(self.shape(self.answers[row][done : done + 6], self.random))
        return DraftTree.from_paths(context.roots, paths)


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def oracle_chain(right, rng):
    return [right[:4]]


def adversary_chain(right, rng):
    return [[wrong(token) for token in right[:4]]]


def random_chain(right, rng):
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(5))]]


def noisy_chain(right, rng):
    return [[token if rng.random() < 0.7 else wrong(token) for token in right[:5]]]


def oracle_tree(right, rng):
    """Three paths; the last one is right and shares its first node with the second one."""
    if len(right) < 3:
        return [right]
    return [[wrong(right[0]), right[1]], [right[0], wrong(right[1]), right[2]], right]


def adversary_tree(right, rng):
    return [[wrong(token) for token in right[:3]], [wrong(wrong(right[0]))]] if right else []


def random_tree(right, rng):
    """Random branches, some of which begin with right tokens."""
    paths = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 4))] for _ in range(3)]
    paths.append([*right[: rng.randrange(6)], rng.randrange(VOCAB)])
    rng.shuffle(paths)
    return paths


SHAPES = [
    oracle_chain,
    adversary_chain,
    random_chain,
    noisy_chain,
    oracle_tree,
    adversary_tree,
    random_tree,
]


def generated(sequences: torch.LongTensor, prompt_columns: int) -> list[list[int]]:
    return sequences[:, prompt_columns:].tolist()


@functools.cache
def greedy_text(
    name: str, lengths: tuple[int, ...], new_tokens: int, attn_implementation: str | None = None
) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """Return (input_ids, attention_mask, sequences): random prompts and the text of ``model.generate``."""
    ids, mask = prompts(lengths)
    model = tiny_model(name, attn_implementation)
    kwargs = dict(attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return ids, mask, model.generate(ids, **kwargs)


# Names for parametrized tests: no drafter, two real ones, and scripts from always right to always wrong.
DRAFTERS = [
    "none",
    "ngram",
    "self",
    "oracle_chain",
    "adversary_chain",
    "noisy_chain",
    "oracle_tree",
    "random_tree",
]


def make_drafter(
    name: str, model: PreTrainedModel, answers: list[list[int]]
) -> specdec_ext.Drafter | None:
    """Make a drafter of ``DRAFTERS`` or ``SHAPES``; ``answers`` as in ``ScriptedDrafter``."""
    if name == "none":
        return None
    if name == "ngram":
        return specdec_ext.NgramDrafter(min_ngram=1, num_branches=2)
    if name == "self":
        return specdec_ext.DraftModelDrafter(model)
    return ScriptedDrafter(answers, {shape.__name__: shape for shape in SHAPES}[name])


BATCHES = {"one": (7,), "five-ragged": (12, 3, 9, 5, 12)}  # lengths of prompts
every_batch = pytest.mark.parametrize("batch", BATCHES)
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
