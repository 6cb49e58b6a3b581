"""Contexts of calls, for drafters that are run without a decoding loop."""

from __future__ import annotations

from typing import TypeVar

import torch
from helpers.models.tiny import tiny_model

from specdec_ext import Drafter
from specdec_ext.context import Context

AnyDrafter = TypeVar("AnyDrafter", bound=Drafter)


def context_of(texts: list[list[int]], max_length: int = 200) -> Context:
    """A call whose rows have these texts, padded on the left; the last token of each is generated."""
    width = max(map(len, texts)) - 1
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        begin = width - len(text) + 1
        ids[row, begin:], mask[row, begin:] = torch.tensor(text[:-1]), 1
    context = Context(ids, mask, 0, max_length, draw=None, sample=None)
    context.generated = [text[-1:] for text in texts]
    return context


def started(drafter: AnyDrafter, context: Context) -> AnyDrafter:
    drafter.start(context, tiny_model("llama"), None)
    return drafter
