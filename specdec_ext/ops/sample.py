"""Filters of the target distribution before a token is drawn from it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.ops import _library


def sample_filter(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Temperature, top-k, top-p and min-p of every row: what transformers' warpers do, in their order.

    1. scores are ``logits / temperature`` in float32;
    2. top-k keeps the scores that are not below the k-th largest, ties included;
    3. top-p keeps a token if the probability of the tokens before it, in descending order among those
       still there, is below ``top_p``. Equal scores come in descending index order (transformers sorts
       them in any order), so as many tokens are kept as transformers keeps;
    4. min-p keeps probabilities of at least ``min_p`` times the largest.

    The largest score always stays. Every backend gives the same bits, one row does not depend on the
    others. A row with NaN is only divided, so that :func:`verify_match` finds the NaN; so is one that is
    all -inf. Scores of +inf hold all the probability.

    Args:
        logits: ``[rows, vocab]`` float32, bfloat16 or float16, contiguous in the last dimension, at most
            2^22 tokens.
        temperature: ``[rows]`` float32, positive: 0, which others take for greedy, is an error (on CUDA,
            where no value can be checked, the scores become infinite or NaN).
        top_k: ``[rows]`` int64; 0 is off.
        top_p: ``[rows]`` float32 in [0, 1]; 1 is off.
        min_p: ``[rows]`` float32 in [0, 1]; 0 is off.

    Returns:
        ``[rows, vocab]`` float32: the scores, -inf for a token that was removed.

    Raises:
        ValueError: on the CPU also for a parameter outside its range.
    """
    return _library.native.sample_filter(logits, temperature, top_k, top_p, min_p)


@torch.library.register_fake("specdec::sample_filter")
def _sample_filter_fake(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
