"""The noise with which heads draft when a call samples (:func:`specdec_ext.ops.couple_logits`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.context import Context
from specdec_ext.ops import DraftNoise


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless a relative temperature is a finite number that is not negative."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            "temperature is relative to the one that the call suggests to drafters and must be a finite "
            f"number of at least 0 (0: draft without noise), got {temperature}"
        )


def draft_noise(context: Context, temperature: float, device: torch.device) -> DraftNoise | None:
    """The noise for drafts of all rows of the batch, on ``device``; None for drafts without noise.

    Args:
        temperature: relative to the one that the call suggests.
    """
    if context.noise is None or temperature == 0:
        return None
    temperatures, *numbers = context.noise
    return DraftNoise(*(each.to(device) for each in (temperatures * temperature, *numbers)))


class RowNoise(NamedTuple):
    """The noise of the active rows, for the drafts of one round.

    Attributes:
        noise: of the rows.
        positions: ``[rows]``, of the roots.
    """

    noise: DraftNoise
    positions: Tensor

    @classmethod
    def of(cls, context: Context, noise: DraftNoise | None) -> RowNoise | None:
        """Select the active rows of ``noise``, which is that of all rows; None if there is none."""
        if noise is None:
            return None
        numbers = context.staging.stage([context.rows, context.root_positions]).tensor
        rows, positions = numbers.to(noise.seeds.device)
        return cls(noise.of_rows(rows), positions)


def best_children(
    logits: Tensor, ranks: int, noise: RowNoise | None, level: int
) -> tuple[Tensor, Tensor]:
    """The best children of the nodes of a level, given the noise if there is some.

    Args:
        logits: ``[rows, nodes, vocab]``.
        ranks: number of children of each node.
        level: level of the children; those of the root have level 1.

    Returns:
        Log-probabilities and tokens, ``[rows, nodes, ranks]`` each, best first.
    """
    rows, nodes, vocab = logits.shape
    if noise is not None:
        index = torch.arange(rows, device=logits.device).repeat_interleave(nodes)
        positions = noise.positions.repeat_interleave(nodes) + level
        coupled = ops.couple_logits(
            logits.reshape(-1, vocab), noise.noise.of_rows(index), positions
        )
        logits = coupled.view(rows, nodes, vocab)
    logits = torch.where(logits.isnan(), -torch.inf, logits.float())
    best = logits.log_softmax(dim=-1).topk(min(ranks, vocab), dim=-1)
    return best.values, best.indices
