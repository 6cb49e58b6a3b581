"""``sample_filter``: filters of the target distribution before a token is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.ops import _library


def sample_filter(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Apply temperature, top-k, top-p and min-p to every row, like transformers' warpers in their order.

    1. The scores are ``logits / temperature`` in float32.
    2. Top-k keeps the scores that are not below the k-th largest, ties included.
    3. Top-p keeps a token if the remaining tokens before it, in descending order of score, have a total
       probability below ``top_p``. Equal scores are in descending order of index (their order in transformers
       is undefined), so as many tokens are kept as in transformers.
    4. Min-p keeps tokens whose probability is at least ``min_p`` times the largest.

    The token with the largest score is always kept. Every backend gives the same bits, and rows do not depend
    on each other. Rows with NaN, and rows that are all -inf, are only divided, so that :func:`verify_match`
    detects them. Scores of +inf have all of the probability.

    Args:
        logits: ``[rows, vocab]`` float32, bfloat16 or float16, contiguous in the last dimension, at most
            2^22 tokens.
        temperature: ``[rows]`` float32, positive. 0, which means greedy elsewhere, is an error; on CUDA
            values are not checked, and 0 gives infinite or NaN scores.
        top_k: ``[rows]`` int64; 0 turns it off.
        top_p: ``[rows]`` float32 in [0, 1]; 1 turns it off.
        min_p: ``[rows]`` float32 in [0, 1]; 0 turns it off.

    Returns:
        ``[rows, vocab]`` float32: the scores, with -inf for tokens that were removed.

    Raises:
        ValueError: for an invalid argument; values outside their range are detected on the CPU only.
    """
    return _library.native.sample_filter(logits, temperature, top_k, top_p, min_p)


@torch.library.register_fake("specdec::sample_filter")
def _sample_filter_fake(logits: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
