"""``decoder_layers``: all layers of a Llama-like decoder in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library

# The weights of a layer, in the order of the op.
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

# The matrices among them, in the order of their scales.
LAYER_MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


class DecoderStates(NamedTuple):
    """The outputs of a decoder.

    Attributes:
        states: ``[layers, batch, nodes, hidden]``, the output of each layer.
        output: ``[batch, nodes, hidden]``, the output of the last layer after the final norm.
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
    ancestors: Tensor | None,
    prefix_starts: Tensor,
    prefix_lengths: Tensor,
    start: int,
    head_dim: int,
    eps: float,
    scale: float,
    scales: Sequence[Tensor] = (),
    levels: Tensor | None = None,
) -> DecoderStates:
    """Run layers as in Llama: RMS norms, rotary attention over draft trees, and a gated SiLU network.

    Without ``ancestors``, the nodes are columns of prompts instead, each of which sees the columns before.

    The specification is :func:`specdec_ext.reference.decoder_layers.decoder_layers`. Matrix products are
    :func:`specdec_ext.ops.linear` and attention is :func:`specdec_ext.ops.tree_attention`. Values that the
    PyTorch model stores as tensors are rounded to the dtype. So the bits of a node do not depend on the other
    nodes and rows. The columns of a prompt are multiplied in the order for many rows. CPU only.

    Args:
        input: ``[batch, nodes, hidden]`` float32 or bfloat16 embeddings. All tensors except weights and
            caches must be contiguous.
        cosines: ``[batch or 1, nodes, head_dim]`` of the same dtype, for each node's position.
        sines: like ``cosines``.
        weights: ``LAYER_TENSORS`` of each layer, all of the same dtype, followed by the final norm. Missing
            biases and norms of heads are empty tensors. Weights are not copied. A matrix may be the codes of a
            :class:`QuantisedWeight`.
        caches: keys and values of each layer, ``[batch, kv_heads, slots, head_dim]``; slots from ``start``
            on are written.
        windows: the window of each layer as for ``tree_attention``, 0 for none.
        ancestors: ``[batch, nodes, ceil(nodes / 64)]`` int64, packed bits as from ``tree_mask``; None for
            columns of prompts, of which there may be any number.
        prefix_starts: ``[batch]`` int64; slot of each row's first token.
        prefix_lengths: ``[batch]`` int64; number of committed tokens of each row. For prompts it must be
            ``start - prefix_starts``; if that is negative, so many columns of the row are padding.
        start: the slot of node 0 in all rows.
        head_dim: dimension of queries, keys and values; even.
        eps: epsilon of all norms.
        scale: factor of the dot products.
        scales: the scales of ``LAYER_MATRICES`` of each layer, empty tensors for matrices that are no codes;
            nothing if none is.
        levels: the levels of all codes of 4 bits.

    Raises:
        ValueError: for an invalid argument, before anything is written.
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
            scales,
            levels,
        )
    )


@torch.library.register_fake("specdec::decoder_layers")
def _decoder_layers_fake(
    input: Tensor, cosines: Tensor, sines: Tensor, weights: Any, caches: Any, windows: Any, *_: Any
) -> tuple[Tensor, Tensor]:
    return input.new_empty(len(windows), *input.shape), torch.empty_like(input)
