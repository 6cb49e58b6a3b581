"""``decoder_layers``: all layers of a decoder in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library

# The weights that a layer may have.
LAYER_TENSORS = (
    "attention_norm",
    "attention_norm_bias",
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
    "attention_output_norm",
    "mlp_norm",
    "mlp_norm_bias",
    "gate",
    "gate_bias",
    "up",
    "up_bias",
    "down",
    "down_bias",
    "mlp_output_norm",
    "router",
    "experts_gate",
    "experts_down",
    "shared_gate",
    "shared_gate_bias",
)

# The matrices that may be codes, in the order of their scales.
LAYER_MATRICES = ("query", "key", "value", "output", "gate", "up", "down", "shared_gate")


# The order of both enumerations is that of csrc/include/specdec/decoder_form.h.
class Norm(IntEnum):
    """What the norms of a decoder compute, with ``inverse = 1 / sqrt(mean(x^2) + eps)``.

    Attributes:
        RMS: ``x * inverse``, rounded to the dtype, times the weight (Llama).
        RMS_WIDE: ``x * inverse * weight``, rounded once (OLMo 2).
        RMS_OFFSET: ``x * inverse * (1 + weight)``, rounded once (Gemma).
        LAYER: ``torch.nn.LayerNorm``.
    """

    RMS = 0
    RMS_WIDE = 1
    RMS_OFFSET = 2
    LAYER = 3


class Activation(IntEnum):
    """Activation functions of an MLP.

    Attributes:
        SILU, GELU: ``torch.nn.functional.silu`` and ``gelu``.
        GELU_TANH: ``torch.nn.functional.gelu(approximate="tanh")``.
        GELU_NEW: the same formula as operations of PyTorch, each rounded to the dtype (GPT-2).
    """

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    GELU_NEW = 3


@dataclass(frozen=True)
class DecoderForm:
    """What the layers of a decoder compute, as far as their tensors do not tell; by default as in Llama.

    Attributes:
        tensors: names in ``LAYER_TENSORS`` of the weights that are given for each layer.
        norm: kind of all norms.
        activation: between the matrices of the MLP.
        interleaved: the rows of ``query``, which has those of keys and values too, are head by head: those of
            the query, the key and the value of each head (GPT-NeoX).
        parallel: attention and MLP both read the input of the layer, which becomes ``(mlp + attention) +
            input``. Such layers have no norms of outputs, and ``residual_scale`` is 1.
        transposed: matrices are stored as ``[ins, outs]`` (GPT-2); codes are not.
        softcap: attention scores become ``softcap * tanh(scores / softcap)``; 0 for none.
        residual_scale: factor of the outputs of attention and MLP before they are added.
        top_k: number of experts that a node chooses in layers with a router.
        normalised: the weights of the chosen experts are divided by their sum.
        wide_experts: these weights, and the outputs times them, are float32 (Mixtral). Otherwise they are
            rounded to the dtype.
        tables: of each layer, the index of its cosines and sines, -1 for no rotation; empty: 0 for all.
    """

    tensors: tuple[str, ...] = LAYER_TENSORS
    norm: Norm = Norm.RMS
    activation: Activation = Activation.SILU
    interleaved: bool = False
    parallel: bool = False
    transposed: bool = False
    softcap: float = 0.0
    residual_scale: float = 1.0
    top_k: int = 0
    normalised: bool = False
    wide_experts: bool = False
    tables: tuple[int, ...] = ()

    @cached_property
    def native(self) -> tuple[Any, ...]:
        """The last arguments of the native op."""
        return (
            [LAYER_TENSORS.index(name) for name in self.tensors],
            self.tables,
            int(self.norm),  # torch takes microseconds to read an enumeration
            int(self.activation),
            self.interleaved,
            self.parallel,
            self.transposed,
            self.softcap,
            self.residual_scale,
            self.top_k,
            self.normalised,
            self.wide_experts,
        )


LLAMA = DecoderForm()


class DecoderStates(NamedTuple):
    """The outputs of a decoder.

    Attributes:
        states: ``[layers, batch, nodes, hidden]``, the output of each layer; without the last one, if not all
            outputs are needed.
        output: ``[batch, nodes, hidden]``, the output of the last layer after the final norm, of the nodes
            that are needed.
    """

    states: Tensor
    output: Tensor


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
) -> DecoderStates:
    """Run the layers of a decoder, which attend over draft trees, and the final norm.

    Without ``ancestors``, the nodes are columns of prompts instead, each of which sees the columns before.

    The specification is :func:`specdec_ext.reference.decoder_layers.decoder_layers`. Matrix products are
    :func:`specdec_ext.ops.linear` and attention is :func:`specdec_ext.ops.tree_attention`. Values that the
    PyTorch model stores as tensors are rounded to the dtype. So the bits of a node do not depend on the other
    nodes and rows. The columns of a prompt are multiplied in the order for many rows. CPU only.

    Args:
        input: ``[batch, nodes, hidden]`` float32 or bfloat16 embeddings. All tensors except weights and
            caches must be contiguous.
        cosines: tables of ``[batch or 1, nodes, rotary]`` for each node's position, all of the same dtype or
            all float32, with which a rotation is rounded once. The first ``rotary`` numbers of each head are
            rotated, an even number, in all tables the same.
        sines: like ``cosines``.
        weights: ``form.tensors`` of each layer, all of the same dtype, followed by the final norm and its
            bias. What a layer does not have is left out or an empty tensor: biases, norms, and the gate of an
            MLP that is ``down(activation(up(x)))``. If ``key`` and ``value`` are absent, ``query`` has the
            rows of all three; if ``up`` is absent, ``gate`` has the rows of both. ``query_norm`` and
            ``key_norm`` are ``[head_dim]``, or over all heads of queries and of keys. Only ``LayerNorm`` has
            a bias. Weights are not copied. A matrix may be the codes of a :class:`QuantisedWeight`.
            A layer with a ``router`` ``[experts, hidden]`` has several MLPs: ``experts_gate [experts, 2 *
            inner, hidden]``, the rows of gate and up, and ``experts_down [experts, hidden, inner]``. Each
            node chooses some; only their weights are read, once for all nodes. If the layer has a
            ``shared_gate [1, hidden]``, too, then ``gate``, ``up`` and ``down`` are the MLP of a shared
            expert, which is multiplied by ``sigmoid(shared_gate(x))``. Layers may have MLPs of different
            sizes.
        caches: keys and values of each layer, ``[batch, kv_heads, slots, head_dim]``; slots from ``start``
            on are written.
        windows: the window of each layer as for ``tree_attention``, 0 for none.
        ancestors: ``[batch, nodes, ceil(nodes / 64)]`` int64, packed bits as from ``tree_mask``; None for
            columns of prompts, of which there may be any number.
        prefix_starts: ``[batch]`` int64; slot of each row's first token.
        prefix_lengths: ``[batch]`` int64; number of committed tokens of each row. For prompts it must be
            ``start - prefix_starts``; if that is negative, so many columns of the row are padding.
        start: the slot of node 0 in all rows.
        head_dim: dimension of queries, keys and values.
        eps: epsilon of all norms.
        scale: factor of the dot products.
        scales: the scales of ``LAYER_MATRICES`` of each layer, empty tensors for matrices that are no codes;
            nothing if none is.
        levels: the levels of all codes of 4 bits.
        outputs: for prompts, the number of last columns whose outputs are needed; None for all. The last
            layer writes the keys and values of all columns, and computes nothing else of the others.
        form: what else the layers compute.

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
            outputs,
            *form.native,
        )
    )


@torch.library.register_fake("specdec::decoder_layers")
def _decoder_layers_fake(
    input: Tensor,
    cosines: Any,
    sines: Any,
    weights: Any,
    caches: Any,
    windows: Any,
    ancestors: Any,
    prefix_starts: Any,
    prefix_lengths: Any,
    start: int,
    head_dim: int,
    eps: float,
    scale: float,
    scales: Any,
    levels: Any,
    outputs: int | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    batch, nodes, hidden = input.shape
    needed = nodes if outputs is None else outputs
    states = input.new_empty(len(windows) - (needed < nodes), batch, nodes, hidden)
    return states, input.new_empty(batch, needed, hidden)
