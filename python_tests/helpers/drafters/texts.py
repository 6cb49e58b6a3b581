"""Texts with a drafter that drafts for one target, and what must hold for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import specdec_ext
from specdec_ext import Drafter

LENGTH = 40
# Greedy with an end, sampled, and sampled with an end and a filter.
KEYWORDS = (
    dict(eos_token_id=3),
    dict(do_sample=True, temperature=0.8),
    dict(do_sample=True, top_p=0.9, eos_token_id=2),
)


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Any:
    """``specdec_ext.generate`` of 40 greedy tokens with statistics, unless ``kwargs`` say otherwise."""
    kwargs = {
        "max_new_tokens": LENGTH,
        "do_sample": False,
        "return_dict_in_generate": True,
        **kwargs,
    }
    return specdec_ext.generate(model, ids, attention_mask=mask, **kwargs)


def texts_of_the_target(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, drafter: Drafter
) -> Iterator[Any]:
    """Yield the outputs with a draft in every step; each text equals that of plain decoding."""
    for kwargs in KEYWORDS:
        out = []
        for each in (None, drafter):
            torch.manual_seed(4)
            out.append(generate(model, ids, mask, drafter=each, speculation="fixed", **kwargs))
        assert torch.equal(out[0].sequences, out[1].sequences)
        yield out[1]


def mean_sampled_length(
    model: PreTrainedModel, ids: Tensor, drafter: Drafter, temperature: float
) -> float:
    """Mean acceptance length in 200 tokens that are sampled at this temperature."""
    torch.manual_seed(5)
    out = generate(
        model, ids, drafter=drafter, speculation="fixed", do_sample=True, max_new_tokens=200,
        temperature=temperature,
    )  # fmt: skip
    return out.speculation_stats.mean_acceptance_length
