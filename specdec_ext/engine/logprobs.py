"""``logprobs_of``: log probabilities of emitted tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext.engine.handle import TokenLogprobs


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """The log probabilities of ``tokens`` and of the ``top`` most probable ones in their places.

    Args:
        logits: ``[len(tokens), vocab]``, the model's logits before each token.
        tokens: ids.
        top: number of most probable tokens; those without a number (NaN) are left out.
    """
    scores = logits.float().log_softmax(dim=-1)
    index = torch.tensor(tokens, device=scores.device)[:, None]
    own: list[float] = scores.gather(1, index)[:, 0].tolist()
    values, ids = (part.tolist() for part in scores.topk(top, dim=-1))
    return [
        TokenLogprobs(value, [(i, x) for i, x in zip(*best, strict=True) if not math.isnan(x)])
        for value, *best in zip(own, ids, values, strict=True)
    ]
