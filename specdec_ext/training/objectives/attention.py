"""Attention of training-time test (Li et al. 2025, "EAGLE-3", section 3.2).

In drafting, a node of depth i attends to the committed elements and to its own ancestors, one of each depth.
In training, the head drafts from every element t of a text at once. At step i, element t attends to the
elements up to t of step 0 and, in steps 1 to i, only to element t::

    scores = q[t] . (k_0[0], ..., k_0[t], k_1[t], ..., k_i[t]) / sqrt(head_dim);  output = softmax(scores) v

Steps 1 and later may compute only some of the elements. This is one softmax over a block, which is causal if
all elements are computed, and a few further columns. The block is computed by torch's fused attention, which
also returns the logarithm of its sum of exponentials; the columns are merged with that. The fused backward
kernel recomputes the probabilities from this logarithm, so it is called with the merged one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def unrolled_attention(
    queries: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    window: int | None = None,
    elements: Tensor | None = None,
) -> Tensor:
    """Compute the attention of one step.

    Args:
        queries: ``[rows, heads, m, head_dim]`` of step i, rotated to position t + i.
        keys, values: of steps 0 to i; ``[rows, kv_heads, n, head_dim]`` of step 0, ``[rows, kv_heads, m,
            head_dim]`` of the later ones. Keys are rotated to the position of their own step.
        window: number of tokens that a token attends to, None for all.
        elements: ``[rows, m]`` int64, the elements of step i; None for all n of them.

    Returns:
        ``[rows, heads, m, head_dim]``.
    """
    group = queries.shape[1] // keys[0].shape[1]
    keys = [each.repeat_interleave(group, dim=1) for each in keys]
    values = [each.repeat_interleave(group, dim=1) for each in values]
    n = keys[0].shape[2]
    if window is not None or queries.device.type != "cpu":
        every = torch.arange(n, device=queries.device)[None] if elements is None else elements
        return _explicit(queries, keys, values, window, every)
    if len(keys) == 1:
        return torch.nn.functional.scaled_dot_product_attention(
            queries, keys[0], values[0], is_causal=True
        )
    further = torch.stack(list(keys[1:]), dim=3), torch.stack(list(values[1:]), dim=3)
    mask = None
    if elements is not None:
        hidden = torch.arange(n, device="cpu") > elements[:, None, :, None]
        mask = queries.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    output: Tensor = _Joined.apply(queries, keys[0], values[0], *further, mask)
    return output


def _explicit(
    queries: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    window: int | None,
    elements: Tensor,
) -> Tensor:
    """Compute the formula directly, with all scores in memory; for any device and for windows."""
    n, depth = keys[0].shape[2], len(keys) - 1
    scale = queries.shape[3] ** -0.5
    at, own = torch.arange(n, device=queries.device), elements[:, None, :, None]
    seen = at <= own
    if window is not None:
        seen = seen & (at > own + depth - window)
    scores = [(queries @ keys[0].mT * scale).masked_fill(~seen, -torch.inf)]
    for step in range(1, depth + 1):
        score = (queries * keys[step]).sum(-1, keepdim=True) * scale
        if window is not None and depth - step >= window:
            score = torch.full_like(score, -torch.inf)
        scores.append(score)
    weights = torch.cat(scores, dim=-1).softmax(dim=-1).to(queries.dtype)
    output = weights[..., :n] @ values[0]
    for step in range(1, depth + 1):
        output = output + weights[..., n + step - 1, None] * values[step]
    return output


class _Joined(torch.autograd.Function):
    """The fused version for the CPU.

    ``further`` and ``more`` are the keys and values of steps 1 to i, ``[rows, heads, m, steps, head_dim]``.
    ``mask`` ``[rows, 1, m, n]`` is added to the scores of the block; None for a causal block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        further: Tensor,
        more: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        block, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, mask is None, attn_mask=mask
        )
        wide = log_sum.dtype
        scale = queries.shape[3] ** -0.5
        scores = (further @ queries[..., None]).squeeze(-1).to(wide) * scale
        joint = torch.logaddexp(log_sum, scores.logsumexp(dim=-1))
        weights = (scores - joint[..., None]).exp()
        output = (log_sum - joint).exp()[..., None] * block
        output = output + (weights[..., None, :] @ more.to(wide)).squeeze(-2)
        output = output.to(queries.dtype)
        ctx.save_for_backward(queries, keys, values, further, more, output, joint, weights, mask)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, further, more, output, joint, weights, mask = ctx.saved_tensors
        # The kernel requires the memory layout of its own output.
        gradient = gradient.contiguous()
        by_query, by_key, by_value = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, queries, keys, values, output, joint, 0.0, mask is None, attn_mask=mask
            )
        )
        wide, scale = weights.dtype, queries.shape[3] ** -0.5
        mean = (gradient * output).sum(-1, keepdim=True).to(wide)
        by_score = weights * ((more @ gradient[..., None]).squeeze(-1).to(wide) - mean) * scale
        by_score = by_score.to(queries.dtype)
        by_query = by_query + (by_score[..., None, :] @ further).squeeze(-2)
        by_further = by_score[..., None] * queries[..., None, :]
        by_more = weights.to(queries.dtype)[..., None] * gradient[..., None, :]
        return by_query, by_key, by_value, by_further, by_more, None
