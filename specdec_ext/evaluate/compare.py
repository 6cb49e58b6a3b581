"""Are two greedy texts of one prompt the same, and if not, is it a near-tie or a bug?

A 1-row and an n-row matrix product round differently, so in half precision the best two logits of a
position may change places. A difference is a *near-tie* if the gap between the two tokens' logits is at
most twice the largest difference between the logits that the two ways of computing that position give;
anything else is a bug.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class ComparedRuns:
    """Verdict on two texts.

    Attributes:
        equal: same tokens.
        position: column of the first difference, or None.
        verdict: ``"equal"``, ``"near-tie"`` or ``"bug"``.
        gap: absolute difference of the logits of the two tokens there (single-step pass).
        bound: twice the largest difference of that position's logits between the ways of computing it.
    """

    equal: bool
    position: int | None
    verdict: Literal["equal", "near-tie", "bug"]
    gap: float = 0.0
    bound: float = 0.0


@torch.no_grad()
def compare_runs(
    model: PreTrainedModel,
    first: Tensor,
    second: Tensor,
    prompt_length: int,
    block_lengths: tuple[int, ...] = (2, 4, 8),
) -> ComparedRuns:
    """Compare two greedy continuations of one unpadded prompt.

    Args:
        model: the model both came from.
        first, second: ``[length]`` ids, prompt included; may differ in length.
        prompt_length: tokens of the common prompt.
        block_lengths: how many tokens verification may have scored at once; each is tried.

    Returns:
        The verdict on the first difference.

    Raises:
        ValueError: if the prompts differ or an input is not one-dimensional.
    """
    if first.ndim != 1 or second.ndim != 1:
        raise ValueError(
            f"expected two unbatched texts [length], got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    if not torch.equal(first[:prompt_length], second[:prompt_length]):
        raise ValueError(f"the texts differ within the prompt of {prompt_length} tokens")
    common = min(len(first), len(second))
    different = (first[:common] != second[:common]).nonzero()
    if not len(different):
        if len(first) == len(second):
            return ComparedRuns(True, None, "equal")
        return ComparedRuns(False, common, "bug", float("inf"))  # one ended, the other went on
    position = int(different[0])
    prefix = first[None, :position]
    single = _logits_after(model, prefix, [prompt_length] + [1] * (position - prompt_length))
    others = [_logits_after(model, prefix, [position])]
    for length in block_lengths:
        if position - length >= 1:
            others.append(_logits_after(model, prefix, [position - length, length]))
    bound = 2 * max(float((single - other).abs().max()) for other in others)
    gap = abs(float(single[first[position]] - single[second[position]]))
    return ComparedRuns(False, position, "near-tie" if gap <= bound else "bug", gap, bound)


def _logits_after(model: PreTrainedModel, ids: Tensor, pieces: list[int]) -> Tensor:
    """``[vocab]`` float32 logits after ``ids [1, length]`` when it is run in these pieces."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    start, logits = 0, None
    for length in pieces:
        piece = ids[:, start : start + length]
        logits = model(input_ids=piece, past_key_values=cache, use_cache=True).logits[0, -1]
        start += length
    assert logits is not None
    return logits.float()
