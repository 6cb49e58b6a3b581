"""EAGLE-3 heads in the sizes of published ones, with random weights."""

from __future__ import annotations

import torch

from specdec_ext.heads.config import DraftHead, HeadConfig


def head_config(
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    *,
    head_dim: int = 128,
    draft_vocab: int = 32_000,
) -> HeadConfig:
    """Config of a head with one layer and three features of a target of the same width."""
    return HeadConfig(
        kind="eagle3",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_layers=1,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=hidden,
        num_features=3,
    )


HEADS = {
    "8b": head_config(4096, 14_336, 32, 8, 128_256),  # of Llama-3.1-8B
    "32b": head_config(5120, 25_600, 64, 8, 151_936),  # of Qwen3-32B
    "70b": head_config(8192, 28_672, 64, 8, 128_256),  # of Llama-3.3-70B
}


def random_head(
    config: HeadConfig, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> DraftHead:
    """A head with random weights, twice as large as usual so that tokens differ in probability; norms are 1.

    ``lm_head`` is six times as large, which makes the head about as confident as the bundled one: of the 33
    nodes that a tree of 41 nodes on five levels may expand, both expand 31. With less confident drafts the
    CPU op would expand fewer nodes, because fewer can enter the tree.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        if name == "draft_to_target":
            order = torch.randperm(config.vocab_size, generator=generator, device=device)
            tensors[name] = order[: config.draft_vocab_size].sort().values
        elif "norm" in name:
            tensors[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            weights = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            scale = 6 if name == "lm_head.weight" else 2
            tensors[name] = weights.mul_(scale * shape[-1] ** -0.5)
    return DraftHead(config, tensors)
