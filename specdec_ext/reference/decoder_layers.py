"""Specification of ``decoder_layers``: the layers of a decoder over draft trees or prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_ext.ops.decoder_layers import (
    LAYER_MATRICES,
    LAYER_TENSORS,
    LLAMA,
    Activation,
    DecoderForm,
    Norm,
)
from specdec_ext.ops.quantise import QuantisedWeight
from specdec_ext.reference.tree_attention import tree_attention


def decoder_layers(
    input: Tensor,
    cosines: Sequence[Tensor],
    sines: Sequence[Tensor],
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
    outputs: int | None = None,
    form: DecoderForm = LLAMA,
) -> tuple[Tensor, Tensor]:
    """Arguments and results are those of :func:`specdec_ext.ops.decoder_layers`, in any floating dtype."""
    batch, nodes, _ = input.shape
    if ancestors is None:  # the columns are a chain, which begins behind the padding
        paddings = (-prefix_lengths).clamp(min=0).tolist()
        ancestors = torch.tensor(
            [_chain_ancestors(padding, nodes) for padding in paddings], device=input.device
        )
        prefix_lengths = prefix_lengths.clamp(min=0)

    def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.numel():
            return x
        if form.norm == Norm.LAYER:
            given = bias if bias is not None and bias.numel() else None
            return F.layer_norm(x, weight.shape, weight, given, eps)
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        if form.norm == Norm.RMS:
            return weight * normed.to(x.dtype)
        factor = weight.to(wide.dtype) + (1 if form.norm == Norm.RMS_OFFSET else 0)
        return (normed * factor).to(x.dtype)

    def linear(x: Tensor, name: str) -> Tensor:
        weight, bias = own[name], own[f"{name}_bias"]
        codes = own_scales.get(name)
        if codes is None or not codes.numel():
            weight = weight.T if form.transposed else weight
            return F.linear(x, weight, bias if bias.numel() else None)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        table = levels if weight.dtype == torch.uint8 else None
        expanded = QuantisedWeight(weight, codes, x.shape[-1], table).dequantise(wide)
        return F.linear(x.to(wide), expanded, bias.to(wide) if bias.numel() else None).to(x.dtype)

    def activation(x: Tensor) -> Tensor:
        if form.activation == Activation.SILU:
            return F.silu(x)
        if form.activation == Activation.GELU_NEW:
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
            return 0.5 * x * (1 + inner.tanh())
        exact = form.activation == Activation.GELU
        return F.gelu(x, approximate="none" if exact else "tanh")

    def heads(x: Tensor, weight: Tensor, table: int) -> Tensor:
        """``[batch, heads, nodes, head_dim]``."""
        if weight.numel() == x.shape[-1]:
            x, weight = norm(x, weight), weight[:0]
        x = norm(x.unflatten(-1, (-1, head_dim)), weight)
        if table >= 0:
            cosine, sine = (each[table][:, :, None] for each in (cosines, sines))
            x, rest = x.tensor_split([cosine.shape[-1]], dim=-1)
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
            x = torch.cat([(x * cosine + turned * sine).to(rest.dtype), rest], dim=-1)
        return x.transpose(1, 2)

    def projected(x: Tensor, keys: int) -> Sequence[Tensor]:
        """Queries, keys and values, ``[batch, nodes, heads * head_dim]``."""
        if own["key"].numel():
            return [linear(x, name) for name in ("query", "key", "value")]
        joined = linear(x, "query")
        if form.interleaved:
            by_head = joined.unflatten(-1, (-1, 3, head_dim))
            return [part.flatten(-2) for part in by_head.unbind(-2)]
        return joined.split([joined.shape[-1] - 2 * keys, keys, keys], dim=-1)

    def experts(x: Tensor) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        probabilities = F.linear(x, own["router"]).to(wide).softmax(-1)
        shares, chosen = probabilities.topk(form.top_k)
        if form.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        if not form.wide_experts:
            shares = shares.to(x.dtype)
        total = x.new_zeros(x.shape, dtype=wide)
        for expert in chosen.unique().tolist():  # ascending
            gate, up = F.linear(x, own["experts_gate"][expert]).chunk(2, dim=-1)
            output = F.linear(activation(gate) * up, own["experts_down"][expert])
            by = chosen == expert
            share = shares.where(by, 0).sum(-1, keepdim=True)
            total += (output * share).where(by.any(-1, keepdim=True), 0)
        return total.to(x.dtype)

    def mlp(x: Tensor) -> Tensor:
        if not own["router"].numel():
            return single(x)
        if not own["shared_gate"].numel():
            return experts(x)
        return experts(x) + linear(x, "shared_gate").sigmoid() * single(x)

    def single(x: Tensor) -> Tensor:
        if not own["gate"].numel():
            return linear(activation(linear(x, "up")), "down")
        gate = linear(x, "gate")
        gate, up = (gate, linear(x, "up")) if own["up"].numel() else gate.chunk(2, dim=-1)
        return linear(activation(gate) * up, "down")

    def added(hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return hidden + norm(x, weight) * form.residual_scale

    hidden, states = input, []
    for layer, window in enumerate(windows):
        first = layer * len(form.tensors)
        given = weights[first : first + len(form.tensors)]
        own = dict.fromkeys(LAYER_TENSORS, input.new_empty(0))
        own.update(zip(form.tensors, given, strict=True))
        chosen = scales[layer * len(LAYER_MATRICES) :]
        own_scales = dict(zip(LAYER_MATRICES, chosen, strict=False))
        keys, values = caches[2 * layer : 2 * layer + 2]
        table = form.tables[layer] if form.tables else 0
        x = norm(hidden, own["attention_norm"], own["attention_norm_bias"])
        query, key, value = projected(x, keys.shape[1] * head_dim)
        keys[:, :, start : start + nodes] = heads(key, own["key_norm"], table)
        values[:, :, start : start + nodes] = heads(value, value.new_empty(0), -1)
        attended = tree_attention(
            heads(query, own["query_norm"], table),
            keys,
            values,
            ancestors,
            prefix_starts,
            prefix_lengths,
            torch.full_like(prefix_lengths, start),
            None,
            scale=scale,
            window=window,
            softcap=form.softcap,
        )
        attention = linear(attended.reshape(batch, nodes, -1), "output")
        if form.parallel:
            x = norm(hidden, own["mlp_norm"], own["mlp_norm_bias"])
            hidden = mlp(x) + attention + hidden
        else:
            hidden = added(hidden, attention, own["attention_output_norm"])
            x = norm(hidden, own["mlp_norm"], own["mlp_norm_bias"])
            hidden = added(hidden, mlp(x), own["mlp_output_norm"])
        states.append(hidden)
    output = norm(hidden, *weights[-2:])
    if outputs is None or outputs == nodes:
        return torch.stack(states), output
    return torch.stack([input, *states])[1:-1], output[:, -outputs:]


def _chain_ancestors(first: int, nodes: int) -> list[list[int]]:
    """Return the packed ancestor bits of a chain that begins at node ``first``; nodes before have none."""
    words = range((nodes + 63) // 64)
    chains = [(1 << (node + 1)) - (1 << first) if node >= first else 0 for node in range(nodes)]
    unsigned = [[chain >> 64 * word & (1 << 64) - 1 for word in words] for chain in chains]
    return [[bits - (bits >> 63 << 64) for bits in node] for node in unsigned]
