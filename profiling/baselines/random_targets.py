"""Targets with random weights: in the sizes of published models, to measure cost; tiny, to count calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from baselines.heads import head_config, random_head
from specdec_ext.heads.config import DraftHead

POSITIONS = 8192
Device = torch.device | str
# Name -> (model type, sizes, size of a head's draft vocabulary).
SHAPES: dict[str, tuple[str, dict[str, int], int]] = {
    "135m": (  # SmolLM2-135M
        "llama",
        dict(
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            vocab_size=49_152,
        ),
        8_192,
    ),
    "500m": (  # Qwen2.5-0.5B
        "qwen2",
        dict(
            hidden_size=896,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            intermediate_size=4864,
            vocab_size=151_936,
        ),
        16_384,
    ),
    "1.1b": (  # TinyLlama-1.1B
        "llama",
        dict(
            hidden_size=2048,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            intermediate_size=5632,
            vocab_size=32_000,
            tie_word_embeddings=False,
        ),
        16_384,
    ),
    "8b": (  # Llama-3.1-8B
        "llama",
        dict(
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14_336,
            vocab_size=128_256,
            tie_word_embeddings=False,
        ),
        32_000,
    ),
}
# Tiny models whose passes differ in kind: name -> (model type, sizes beside those of ``_TINY``). Windows are
# shorter than the prompts.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "gpt2": ("gpt2", {"n_inner": 128}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
}
_TINY = dict(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    tie_word_embeddings=False,  # otherwise a token predicts itself
)


def tiny_target(name: str) -> Any:
    """A model of ``TINY`` in float32. Its weights are scaled by fan-in, so that its greedy text varies."""
    kind, sizes = TINY[name]
    model = _random_model(kind, torch.float32, 0, **{**_TINY, **sizes})
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
    return model


def tiny_head() -> DraftHead:
    """An EAGLE-3 head for every model of ``TINY``."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    vocab = _TINY["vocab_size"]
    sizes = head_config(*map(_TINY.__getitem__, names), vocab, head_dim=16, draft_vocab=vocab)
    return random_head(replace(sizes, feature_layers=(0, 1, 2)), torch.float32)


def random_target(name: str, dtype: torch.dtype, device: Device = "cpu") -> Any:
    """A model of ``SHAPES`` in eval mode, without an end-of-sequence token.

    Its weights are drawn in ``dtype`` on ``device``, so that memory never holds a larger or another copy.
    """
    kind, sizes, _ = SHAPES[name]
    with torch.device(device):
        return _random_model(kind, dtype, seed=0, **sizes)


def random_llama(name: str, dtype: torch.dtype, spread: float) -> Any:
    """A Llama in the sizes of a model of ``SHAPES``, whatever the type of that model.

    Args:
        spread: standard deviation of the weights of matrices.
    """
    model = _random_model("llama", dtype, seed=0, **SHAPES[name][1])
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=spread)
    return model


def random_draft_of(name: str, dtype: torch.dtype) -> Any:
    """A draft model for the target ``name``: two layers with as many heads as the target has for keys."""
    kind, sizes, _ = SHAPES[name]
    heads = sizes["num_key_value_heads"]
    return _random_model(
        kind,
        dtype,
        seed=1,
        hidden_size=heads * (sizes["hidden_size"] // sizes["num_attention_heads"]),
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=sizes["intermediate_size"] // 3,
        vocab_size=sizes["vocab_size"],
    )


def _random_model(kind: str, dtype: torch.dtype, seed: int, **sizes: Any) -> Any:
    common = dict(
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    config = AutoConfig.for_model(kind, **{**common, **sizes})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_head_of(name: str, dtype: torch.dtype, device: Device = "cpu") -> DraftHead:
    """An EAGLE-3 head with one layer of the target's width."""
    kind, sizes, draft_vocab = SHAPES[name]
    return _head_like(AutoConfig.for_model(kind, **sizes), draft_vocab, dtype, device)


def head_of(target: Any) -> DraftHead:
    """An EAGLE-3 head for any Llama-like target, with its whole vocabulary."""
    return _head_like(target.config, target.config.vocab_size, target.dtype, target.device)


def _head_like(config: Any, draft_vocab: int, dtype: torch.dtype, device: Device) -> DraftHead:
    sizes = head_config(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
        head_dim=config.hidden_size // config.num_attention_heads,
        draft_vocab=draft_vocab,
    )
    layers = config.num_hidden_layers
    sizes = replace(sizes, feature_layers=(1, layers // 2, layers - 1))
    return random_head(sizes, dtype, device)


def random_prompts(
    vocab_size: int, batch: int, length: int, count: int, device: Device = "cpu"
) -> list[Any]:
    """``count`` prompts of random tokens, in the form of a tokenizer's output."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocab_size, (count, batch, length), generator=generator).to(device)
    return [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids]
