"""Texts and features for training in tests."""

from __future__ import annotations

import torch
from helpers.models.tiny import VOCAB, tiny_model
from torch import Tensor

from specdec_ext.heads.config import DraftHead
from specdec_ext.training.data.batches import Batch, Example


def random_batch(head: DraftHead, rows: int, columns: int, seed: int = 0) -> Batch:
    """Independent random tokens and features, in float64."""
    config = head.config
    generator = torch.Generator().manual_seed(seed)

    def random(width: int) -> Tensor:
        return torch.randn(rows, columns, width, generator=generator, dtype=torch.float64)

    return Batch(
        torch.randint(config.vocab_size, (rows, columns), generator=generator),
        torch.ones(rows, columns, dtype=torch.bool),
        torch.full((rows,), columns),
        random(config.feature_width),
        random(config.target_hidden_size),
    )


def example(tokens: list[int], mask: list[int] | None = None) -> Example:
    ids = torch.tensor(tokens)
    return Example(ids, torch.ones_like(ids).bool() if mask is None else torch.tensor(mask).bool())


def random_examples(count: int, length: int, seed: int = 0) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    return [
        example(torch.randint(VOCAB, (length - i % 3,), generator=generator).tolist())
        for i in range(count)
    ]


def greedy_examples(count: int, prompt: int, length: int, seed: int = 0) -> list[Example]:
    """Random prompts, continued by the tiny Llama."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (count, prompt), generator=generator)
    texts = tiny_model("llama").generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length - prompt, do_sample=False
    )
    return [example(text) for text in texts.tolist()]
