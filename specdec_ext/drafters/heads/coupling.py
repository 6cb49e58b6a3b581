"""The noise with which heads draft when a call samples (:func:`specdec_ext.ops.couple_logits`)."""

from __future__ import annotations

import math

import torch

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
