"""Prompts of different lengths, padded in different places."""

from __future__ import annotations

import functools

import torch
from helpers.models.tiny import generated, make_drafter, prompts, tiny_model

import specdec_ext

LENGTHS = (11, 1, 8, 3, 11)
NEW_TOKENS = 16


@functools.cache
def alone(name: str) -> list[list[int]]:
    """Continuations by transformers of each row without paddings."""
    ids, mask = prompts(LENGTHS)
    return [row_alone(tiny_model(name), ids, mask, row, NEW_TOKENS) for row in range(len(LENGTHS))]


def row_alone(model, ids, mask, row: int, new_tokens: int) -> list[int]:
    """The continuation by transformers of one row without paddings."""
    text = ids[row : row + 1, mask[row].bool()]
    kwargs = dict(attention_mask=torch.ones_like(text), do_sample=False)
    return generated(model.generate(text, max_new_tokens=new_tokens, **kwargs), text.shape[1])[0]


def continued(name: str, ids, mask, drafter="none", answers=None, **kwargs) -> list[list[int]]:
    """Our continuation of padded rows; the drafter is one of ``tiny.make_drafter``."""
    model = tiny_model(name)
    made = make_drafter(drafter, model, alone(name) if answers is None else answers)
    kwargs = dict(max_new_tokens=NEW_TOKENS, do_sample=False) | kwargs
    sequences = specdec_ext.generate(model, ids, attention_mask=mask, drafter=made, **kwargs)
    assert torch.equal(sequences[:, : ids.shape[1]], ids)
    return generated(sequences, ids.shape[1])


def layout(kind: str) -> tuple[torch.LongTensor, torch.LongTensor]:
    """The prompts of ``LENGTHS``, padded with a token other than the padding token."""
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
