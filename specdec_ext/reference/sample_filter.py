"""Specification of ``sample_filter``: sorts each row and applies three filters to it.

With float64 logits, everything but the probability masses is computed in float64, as the exact values that
the op approximates. Other logits are converted to float32 and give exactly the bits of the op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.reference.exp import exp_nonpositive

MASS_BITS = 40


def sample_filter(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Arguments and output are those of ``specdec_ext.ops.sample_filter``."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scores = logits.to(dtype) / temperature.to(dtype)[:, None]
    for row, k, p, m in zip(scores, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True):
        if row.isnan().any() or row.isneginf().all():
            continue
        keep = _top_k(row, k) if k > 0 else torch.ones_like(row, dtype=torch.bool)
        if p < 1:
            keep = _top_p(row, keep, p)
        if m > 0:
            keep &= _weights(row) >= m
        row[~keep] = -torch.inf
    return scores


def _top_k(scores: Tensor, k: int) -> Tensor:
    return scores >= scores.topk(min(k, len(scores))).values[-1]


def _top_p(scores: Tensor, among: Tensor, top_p: float) -> Tensor:
    """Keep tokens, by descending (score, index), while the mass before a token is less than ``top_p``."""
    order = scores.sort(stable=True).indices.flip(0)
    masses = (_weights(scores).double() * 2.0**MASS_BITS).long() * among
    total = int(masses.sum())
    share = int(top_p * 2.0**32)
    nucleus = max(-(-total * share // 2**32), 1)
    before = masses[order].cumsum(0) - masses[order]
    keep = torch.empty_like(among)
    keep[order] = before < nucleus
    return keep & among


def _weights(scores: Tensor) -> Tensor:
    """exp(score - largest score); if that is +inf, only scores of +inf have weight."""
    largest = scores.max().clamp(max=torch.finfo(torch.float32).max)
    difference = (scores - largest).clamp(max=0)
    return difference.exp() if scores.dtype == torch.float64 else exp_nonpositive(difference)
