"""Checks that the text is that of plain decoding and of ``model.generate``, alone and in a batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers.models.tiny import (
    BATCHES,
    ScriptedDrafter,
    generated,
    noisy_chain,
    prompts,
    random_tree,
    tiny_model,
)
from transformers import PreTrainedModel

import specdec_ext
from specdec_ext import Drafter, SpeculationStats

NEW_TOKENS = 32
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 3},
}

every_decoding = pytest.mark.parametrize("decoding", DECODING)


def generate(drafter: Drafter | None, batch: str, decoding: str, **kwargs: Any) -> Any:
    """The tiny Llama's output for one of ``BATCHES``."""
    ids, mask = prompts(BATCHES[batch])
    kwargs = {"max_new_tokens": NEW_TOKENS, **DECODING[decoding], **kwargs}
    return specdec_ext.generate(
        tiny_model("llama"),
        ids,
        attention_mask=mask,
        drafter=drafter,
        return_dict_in_generate=True,
        **kwargs,
    )


@functools.cache
def plain_text(batch: str, decoding: str) -> torch.Tensor:
    """The output of plain decoding, ``drafter=None``."""
    return generate(None, batch, decoding).sequences


def late_ends(batch: str, decoding: str) -> dict[str, Any]:
    """Keywords that end rows at different rounds: end-of-sequence ids that appear late in the plain text."""
    new = plain_text(batch, decoding)[:, -NEW_TOKENS:]
    first = {token: (new == token).int().argmax(dim=1).max() for token in new.unique().tolist()}
    return dict(eos_token_id=sorted(first, key=lambda token: first[token])[-3:], pad_token_id=0)


def counters(output: Any) -> dict[str, Any]:
    """The statistics of an output that do not depend on time."""
    timed = ("seconds", "report", "timed_seconds", "plain_seconds")
    stats = vars(output.speculation_stats)
    return {name: value for name, value in stats.items() if name not in timed}


def check_same_text(drafter: Drafter, batch: str, decoding: str) -> SpeculationStats:
    """Check the text, with drafts in every step and by default; returns the counters of the former."""
    output, by_default = (
        generate(drafter, batch, decoding, speculation=policy) for policy in ("fixed", "auto")
    )
    assert torch.equal(output.sequences, plain_text(batch, decoding))
    assert torch.equal(by_default.sequences, plain_text(batch, decoding))
    return output.speculation_stats


def check_generated_text(model: PreTrainedModel, batch: str, new_tokens: int) -> None:
    """Check that partly right chains and trees give the greedy text of ``model.generate``."""
    ids, mask = prompts(BATCHES[batch])
    kwargs = dict(attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    expected = model.generate(ids, **kwargs)
    for shape in (noisy_chain, random_tree):
        drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
        for policy in ("fixed", "auto"):
            text = specdec_ext.generate(model, ids, drafter=drafter, speculation=policy, **kwargs)
            assert torch.equal(text, expected)
