"""Medusa heads with random weights for the tiny models."""

from __future__ import annotations

import torch
from helpers.models.tiny import VOCAB

from specdec_ext import MedusaHeads
from specdec_ext.heads.medusa import MedusaConfig

HIDDEN = 32


def random_heads(seed: int = 0, **changes) -> MedusaHeads:
    config = MedusaConfig(
        **{**dict(num_heads=3, num_layers=1, hidden_size=HIDDEN), **changes},
        **({} if "vocab_size" in changes else dict(vocab_size=VOCAB, draft_vocab_size=VOCAB)),
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.5
        for name, shape in config.tensor_shapes().items()
    }
    if "draft_to_target" in tensors:
        ids = torch.randperm(config.vocab_size, generator=generator)
        tensors["draft_to_target"] = ids[: config.draft_vocab_size]
    return MedusaHeads(config, tensors)
