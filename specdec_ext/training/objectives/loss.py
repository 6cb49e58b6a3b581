"""Soft cross entropy of a large output matrix, without keeping logits for the backward pass.

With logits z = scale * W h and the teacher's probabilities q of one element, the loss is
``logsumexp(z) - q . z`` and its gradient by z is ``softmax(z) - q``. Both are known in the forward pass.
Therefore the gradients by h and W are computed there, for some elements at a time, and the logits of all
elements are never in memory together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Number of logits in memory at a time: on a CPU few enough for its cache; elsewhere enough to occupy the
# device, because the host launches each part anew.
_LOGITS_CPU, _LOGITS_DEVICE = 1 << 20, 1 << 26
# Matrix products have a multiple of this number of rows; Batch.rounded gives the reason.
_ROWS = 32


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, scale: float = 1.0
) -> Tensor:
    """Compute the sum over elements of the cross entropy to the teacher.

    Args:
        hidden: ``[n, hidden]`` input of the output head.
        weight: ``[vocab, hidden]`` weight of the output head; it is rounded to the dtype of ``hidden``.
        teacher: ``[m, vocab]`` probabilities without gradients.
        rows: ``[n]`` int64 row of ``teacher`` for each element.
        scale: factor on the logits.

    Returns:
        A scalar in float32, or in float64 if ``hidden`` is float64.
    """
    loss: Tensor = _SoftCrossEntropy.apply(hidden, weight, teacher, rows, scale)
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, scale: float
    ) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        wanted = any(ctx.needs_input_grad[:2])
        rounded = weight.to(hidden.dtype)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        # Added elements are zero, so they change no gradient of the weight.
        n, spare = len(hidden), -len(hidden) % _ROWS
        hidden, rows = F.pad(hidden, (0, 0, 0, spare)), F.pad(rows, (0, spare))
        by_hidden = torch.empty_like(hidden)
        by_weight = torch.zeros_like(weight, dtype=wide)
        at_once = _LOGITS_CPU if hidden.device.type == "cpu" else _LOGITS_DEVICE
        size = max(1, at_once // len(weight) // _ROWS) * _ROWS
        for start in range(0, n, size):
            part, count = slice(start, start + size), n - start
            logits = (hidden[part] @ rounded.mT).to(wide).mul_(scale)
            log_probs = logits.log_softmax(dim=-1)
            expected = teacher[rows[part]].to(wide)
            loss -= torch.dot(expected[:count].view(-1), log_probs[:count].view(-1))
            if wanted:
                by_logits = log_probs.exp_().sub_(expected).mul_(scale).to(hidden.dtype)
                by_hidden[part] = by_logits @ rounded
                by_weight += by_logits.mT @ hidden[part]
        ctx.save_for_backward(by_hidden[:n], by_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * gradient.to(by_hidden.dtype), by_weight * gradient, None, None, None
