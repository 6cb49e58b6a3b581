"""Specification of ``decoder_layers``: the layers of a Llama-like decoder over draft trees or prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_ext.ops.decoder_layers import LAYER_MATRICES, LAYER_TENSORS
from specdec_ext.ops.quantise import QuantisedWeight
from specdec_ext.reference.tree_attention import tree_attention


def decoder_layers(
    input: Tensor,
    cosines: Tensor,
    sines: Tensor,
    weights: Sequence[Tensor],
    caches: Sequence[Tensor],
    windows: Sequence[int],
    ancestors: Tensor | None,
    prefix_starts: Tensor,
    prefix_lengths: Tensor,
    start: int,
    head_dim: int,
    eps: float,
    scale: float,
    scales: Sequence[Tensor] = (),
    levels: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results are those of :func:`specdec_ext.ops.decoder_layers`, in any floating dtype."""
    batch, nodes, _ = input.shape
    if ancestors is None:  # the columns are a chain, which begins behind the padding
        paddings = (-prefix_lengths).clamp(min=0).tolist()
        ancestors = torch.tensor(
            [_chain_ancestors(padding, nodes) for padding in paddings], device=input.device
        )
        prefix_lengths = prefix_lengths.clamp(min=0)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return weight * (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)

    def linear(x: Tensor, name: str) -> Tensor:
        weight, bias = own[name], own[f"{name}_bias"]
        codes = own_scales.get(name)
        if codes is None or not codes.numel():
            return F.linear(x, weight, bias if bias.numel() else None)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        table = levels if weight.dtype == torch.uint8 else None
        expanded = QuantisedWeight(weight, codes, x.shape[-1], table).dequantise(wide)
        return F.linear(x.to(wide), expanded, bias.to(wide) if bias.numel() else None).to(x.dtype)

    def heads(x: Tensor, weight: Tensor, rotated: bool) -> Tensor:
        """``[batch, heads, nodes, head_dim]``."""
        x = x.unflatten(-1, (-1, head_dim))
        if weight.numel():
            x = norm(x, weight)
        if rotated:
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
            x = x * cosines[:, :, None] + turned * sines[:, :, None]
        return x.transpose(1, 2)

    hidden, states = input, []
    for layer, window in enumerate(windows):
        first = layer * len(LAYER_TENSORS)
        own = dict(zip(LAYER_TENSORS, weights[first : first + len(LAYER_TENSORS)], strict=True))
        chosen = scales[layer * len(LAYER_MATRICES) :]
        own_scales = dict(zip(LAYER_MATRICES, chosen, strict=False))
        keys, values = caches[2 * layer : 2 * layer + 2]
        x = norm(hidden, own["input_norm"])
        query, key, value = (linear(x, name) for name in ("query", "key", "value"))
        keys[:, :, start : start + nodes] = heads(key, own["key_norm"], True)
        values[:, :, start : start + nodes] = heads(value, value.new_empty(0), False)
        attended = tree_attention(
            heads(query, own["query_norm"], True),
            keys,
            values,
            ancestors,
            prefix_starts,
            prefix_lengths,
            torch.full_like(prefix_lengths, start),
            None,
            scale=scale,
            window=window,
            softcap=0.0,
        )
        hidden = hidden + linear(attended.reshape(batch, nodes, -1), "output")
        x = norm(hidden, own["post_norm"])
        inner = F.silu(linear(x, "gate")) * linear(x, "up")
        hidden = hidden + linear(inner, "down")
        states.append(hidden)
    return torch.stack(states), norm(hidden, weights[-1])


def _chain_ancestors(first: int, nodes: int) -> list[list[int]]:
    """Return the packed ancestor bits of a chain that begins at node ``first``; nodes before have none."""
    words = range((nodes + 63) // 64)
    chains = [(1 << (node + 1)) - (1 << first) if node >= first else 0 for node in range(nodes)]
    unsigned = [[chain >> 64 * word & (1 << 64) - 1 for word in words] for chain in chains]
    return [[bits - (bits >> 63 << 64) for bits in node] for node in unsigned]
