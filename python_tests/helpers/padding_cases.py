"""Rows of different lengths, padded in different places."""

from __future__ import annotations

import functools

import torch
from tiny import generated, prompts, tiny_model

LENGTHS = (11, 1, 8, 3, 11)
NEW_TOKENS = 16


@functools.cache
def alone(name: str) -> list[list[int]]:
    """HF's continuation of each row by itself."""
    ids, mask = prompts(LENGTHS)
    model = tiny_model(name)
    texts = [ids[row : row + 1, mask[row].bool()] for row in range(len(LENGTHS))]
    return [
        generated(
            model.generate(
                text,
                attention_mask=torch.ones_like(text),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            ),
            text.shape[1],
        )[0]
        for text in texts
    ]


def layout(kind: str) -> tuple[torch.LongTensor, torch.LongTensor]:
    """The prompts of ``LENGTHS`` with paddings in different places; paddings hold a token that bites."""
    ids, mask = prompts(LENGTHS)
    width = {"left": 11, "right": 11, "wide": 23}.get(kind, 19)
    out_ids = torch.full((len(LENGTHS), width), 42)
    out_mask = torch.zeros_like(out_ids)
    generator = torch.Generator().manual_seed(7)
    for row, length in enumerate(LENGTHS):
        columns = {
            "left": range(width - length, width),
            "right": range(length),
            "wide": range(6, 6 + length),  # no row touches either edge
            "holes": sorted(torch.randperm(width, generator=generator)[:length].tolist()),
            "holes-then-text": [
                *sorted(torch.randperm(width - 1, generator=generator)[: length - 1].tolist()),
                width - 1,
            ],
            "mixed": range(length) if row % 2 else range(width - length, width),
        }[kind]
        where = torch.tensor(list(columns))
        out_ids[row, where] = ids[row, mask[row].bool()]
        out_mask[row, where] = 1
    return out_ids, out_mask


LAYOUTS = ["left", "right", "wide", "holes", "holes-then-text", "mixed"]
