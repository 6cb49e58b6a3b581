"""All layers of a decoder of the common kind in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library

# The weights of a layer, in this order.
LAYER_TENSORS = (
    "input_norm",
    "query",
    "query_bias",
    "key",
    "key_bias",
    "value",
    "value_bias",
    "query_norm",
    "key_norm",
    "output",
    "output_bias",
    "post_norm",
    "gate",
    "gate_bias",
    "up",
    "up_bias",
    "down",
    "down_bias",
)


class DecoderStates(NamedTuple):
    """What a decoder hands on.

    Attributes:
        states: ``[layers, batch, nodes, hidden]``, the output of each layer.
        output: ``[batch, nodes, hidden]``, that of the last after the final norm.
    """

    states: Tensor
    output: Tensor


def decoder_layers(
    input: Tensor,
    cosines: Tensor,
    sines: Tensor,
    weights: Sequence[Tensor],
    caches: Sequence[Tensor],
    windows: Sequence[int],
    ancestors: Tensor,
    prefix_starts: Tensor,
    prefix_lengths: Tensor,
    start: int,
    head_dim: int,
    eps: float,
    scale: float,
) -> DecoderStates:
    """Layers of RMS norms, rotary attention over draft trees and a gated SiLU network, as Llama has them.

    The specification is :func:`specdec_ext.reference.decoder_layers.decoder_layers`. Products are those of
    :func:`specdec_ext.ops.linear`, attention is :func:`specdec_ext.ops.tree_attention`, and what a model
    makes a tensor of is rounded to the dtype, so a node has the same bits whatever runs with it. CPU only.

    Args:
        input: ``[batch, nodes, hidden]`` float32 or bfloat16 embeddings, contiguous, as all tensors that are
            not a weight or a cache.
        cosines: ``[batch or 1, nodes, head_dim]`` of the same dtype, of each node's position.
        sines: likewise.
        weights: for each layer ``LAYER_TENSORS``, all of the same dtype, and behind them the final norm;
            empty where there is none (biases, norms of heads). They are read where they are.
        caches: keys and values of each layer, ``[batch, kv_heads, slots, head_dim]``; slots from ``start``
            on are written.
        windows: of each layer, 0 for none, as for ``tree_attention``.
        ancestors: ``[batch, nodes, ceil(nodes / 64)]`` int64, packed bits as from ``tree_mask``.
        prefix_starts: ``[batch]`` int64; slot of a row's first token.
        prefix_lengths: ``[batch]`` int64; committed tokens of a row.
        start: the slot of node 0 in all rows.
        head_dim: of queries, keys and values; even.
        eps: of all norms.
        scale: of the dot products.

    Raises:
        ValueError: naming the argument, before anything is written.
    """
    return DecoderStates(
        *_library.native.decoder_layers(
            input,
            cosines,
            sines,
            weights,
            caches,
            windows,
            ancestors,
            prefix_starts,
            prefix_lengths,
            start,
            head_dim,
            eps,
            scale,
        )
    )


@torch.library.register_fake("specdec::decoder_layers")
def _decoder_layers_fake(
    input: Tensor,
    cosines: Tensor,
    sines: Tensor,
    weights: Sequence[Tensor],
    caches: Sequence[Tensor],
    windows: Sequence[int],
    ancestors: Tensor,
    prefix_starts: Tensor,
    prefix_lengths: Tensor,
    start: int,
    head_dim: int,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return input.new_empty(len(windows), *input.shape), torch.empty_like(input)
