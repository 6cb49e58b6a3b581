"""Specification of ``couple_logits``: drafts that share the noise of the verification.

When a call samples, the match rule emits the token with the largest ``log p + g``. Here p is the target's
distribution and g the Gumbel noise of (seed, row, position, token). A drafter knows g, and its own
distribution q is an estimate of p. So its best guess is the token with the largest ``log q + g``. Drafts that
are chosen this way are called *coupled*. They do not change the text: neither p nor g depends on them.

The op computes ``c = logits / temperature + g``. Everything else is done with c as without noise: the best
children of a node have the largest c, and ``log softmax(c)`` is the score of a child. This score is an
estimated log-probability that the target draws the child at this node, given the noise: if log p is log q
plus independent errors that have a Gumbel distribution, the probability is ``softmax(log q + g)``
(docs/internals/verification.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.ops.couple_logits import DraftNoise
from specdec_ext.reference.rng import gumbel_noise


def couple_logits(
    logits: Tensor, noise: DraftNoise, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """Arguments and output are those of ``specdec_ext.ops.couple_logits``; float64 logits stay float64."""
    vocab = logits.shape[1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(dtype, copy=True)
    ids = torch.arange(vocab, device=logits.device) if token_ids is None else token_ids
    num_tokens = int(ids.max()) + 1
    for row, temperature in enumerate(noise.temperatures.tolist()):
        if not temperature > 0:
            continue
        g = gumbel_noise(noise.seeds[row], noise.row_ids[row], positions[row], num_tokens)
        scores[row] = scores[row] / noise.temperatures[row] + g[ids]
    return scores
