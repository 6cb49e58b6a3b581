"""``DirectPass``: run all layers of a decoder with one op instead of its modules.

The op reads the model's own weights without a copy, and uses the same row-invariant matrix products and
attention as other block passes. Parts of the first prompts of a model, and the first pass over a draft tree,
are computed both ways, and the logits are compared.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_ext import ops
from specdec_ext.models.cache.layers import RollbackLayer
from specdec_ext.models.passes.agreement import (
    TOLERANCE,
    TOLERANCE_WITH_EXPERTS,
    relative_difference,
)
from specdec_ext.models.passes.attention import TreeBlock
from specdec_ext.models.passes.direct.families import Family
from specdec_ext.models.passes.direct.rotations import TABLE_GROWTH, Rotation, RotationTable
from specdec_ext.models.passes.known_code import has_code_of, has_global_hooks, has_known_experts
from specdec_ext.ops.decoder_layers import LAYER_TENSORS, DecoderForm
from specdec_ext.ops.quantise import QuantisedWeight

# Kinds of passes; see also end_of_prompt.
PROMPT, TREE = "prompt", "tree"

# Limits of the buffers that ops on the CPU keep between calls: kSplitKeys and kWaveFloats of
# csrc/cpu/attention, kManyPassRows of csrc/cpu/products.
SPLIT_KEYS, WAVE_FLOATS, PACKED_ROWS = 256, 1 << 22, 512

# Of each model, the kinds of passes of which both ways were compared, and whether they agreed.
_agreed: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()


@dataclass(frozen=True)
class PromptBlock:
    """Columns of prompts; with the attributes of :class:`TreeBlock` that ``ops.decoder_layers`` takes.

    Attributes:
        prefix_starts: ``[rows]`` slot of the first token of each row.
        prefix_lengths: ``[rows]`` number of tokens before the columns; negative if these begin with padding.
        stop: the slot after the last column, a number on the host.
    """

    prefix_starts: Tensor
    prefix_lengths: Tensor
    stop: int
    ancestors: None = None


@dataclass(frozen=True)
class DirectPass:
    """The embeddings, all layers, the final norm and the output head of one model.

    Attributes:
        kinds: classes of the modules, as for :func:`has_code_of`.
        embedding_scale: factor of the embeddings, None for 1.
        positions: embeddings of positions, which are added; None if there are none.
        rotations: one function for each table of rotations: states, position ids -> cosines, sines.
        weights, scales, levels: as :func:`specdec_ext.ops.decoder_layers` takes them.
        logits_divisor, logits_cap: the logits are divided by one, and capped like attention scores by the
            other; None to leave them.
        windows: sliding window of each layer, 0 for full attention.
    """

    family: Family
    kinds: dict[str, frozenset[type]]
    embedding: Tensor
    embedding_scale: Tensor | float | None
    positions: Tensor | None
    rotations: list[Rotation]
    weights: list[Tensor]
    scales: list[Tensor]
    levels: Tensor | None
    head: Tensor | QuantisedWeight
    head_bias: Tensor | None
    logits_divisor: float | None
    logits_cap: float | None
    windows: list[int]
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    form: DecoderForm

    def serves(self, implementation: str, layers: Sequence[Any]) -> bool:
        """Whether this attention computes the same, and these cache layers match the decoder layers."""
        # A cache layer without a window is fine: it keeps all tokens.
        return (
            implementation == self.family.implementation
            and len(layers) == len(self.windows)
            and all(
                type(layer) is RollbackLayer and layer.window in (None, window)
                for layer, window in zip(layers, self.windows, strict=True)
            )
        )

    def with_tables(self) -> DirectPass:
        """This pass with tables of the rotations, which must be fixed, for one call."""
        return replace(self, rotations=[*map(RotationTable, self.rotations)])

    def __call__(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        block: TreeBlock | PromptBlock,
        layers: Sequence[RollbackLayer],
        scored: int | None = None,
        needs_last_states: bool = True,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Score ``tokens [rows, nodes]`` and append their keys and values to the cache.

        Args:
            tokens, position_ids: ``[rows, nodes]``.
            block: where the nodes are.
            layers: of the cache.
            scored: number of last nodes whose logits are wanted; None for all.
            needs_last_states: whether the states of the last layer are wanted of the other nodes, too.

        Returns:
            ``[rows, scored, vocab]`` logits, and the arguments of :meth:`HiddenStateRecorder.chosen`.
        """
        rows, nodes = tokens.shape
        hidden = nn.functional.embedding(tokens, self.embedding)
        if (factor := self.embedding_scale) is not None:
            hidden = hidden * (factor.to(hidden.dtype) if isinstance(factor, Tensor) else factor)
        if self.positions is not None:
            hidden = hidden + nn.functional.embedding(position_ids, self.positions)
        caches = []
        for layer in layers:
            layer.reserve(block.stop)
            if not layer.is_initialized:
                nothing = hidden.new_empty(rows, self.kv_heads, 0, self.head_dim)
                layer.lazy_initialization(nothing, nothing)
            layer.length = block.stop
            caches += layer.buffers
        if len(caches[0]) != rows:
            caches = [buffer[:rows] for buffer in caches]
        tables = [rotation(hidden, position_ids) for rotation in self.rotations]
        states, output = ops.decoder_layers(
            hidden,
            [cosines for cosines, _ in tables],
            [sines for _, sines in tables],
            self.weights,
            caches,
            self.windows,
            block.ancestors,
            block.prefix_starts,
            block.prefix_lengths,
            block.stop - nodes,
            self.head_dim,
            self.eps,
            self.scale,
            self.scales,
            self.levels,
            None if needs_last_states else scored,
            self.form,
        )
        needed = output if scored is None else output[:, -scored:]
        logits = ops.linear(needed, self.head, self.head_bias)
        if self.logits_divisor is not None:
            logits = logits / self.logits_divisor
        if self.logits_cap is not None:  # torch's tanh has the same bits in passes of all sizes
            logits = torch.tanh(logits / self.logits_cap) * self.logits_cap
        return logits, (hidden, states, output)

    def work_bytes(self, rows: int, nodes: int, slots: int) -> int:
        """Bytes that a pass needs beside its logits: the states of all layers, and the buffers of the ops.

        Args:
            rows, nodes: the pass scores ``nodes`` tokens of each of ``rows`` rows.
            slots: the slot after the last one that they attend to.
        """
        layers = [self._outs(layer) for layer in range(len(self.windows))]
        keys, hidden = 2 * self.kv_heads * self.head_dim, self.embedding.shape[1]
        queries = layers[0]["query"] - (0 if layers[0]["key"] else keys)
        inner = max(
            max(outs["up"] or outs["gate"] // 2, outs["experts_gate"] // 2) for outs in layers
        )
        experts = max(outs["router"] for outs in layers)
        # The buffers of csrc/cpu/decoder_layers.cpp, between the embeddings, the states and the output.
        widths = [
            hidden,
            hidden,
            max(queries + keys, 2 * inner, experts),
            max(queries, inner),
            queries,
        ]
        kept = hidden * (len(self.windows) + 2 + self.form.parallel)
        size, count = self.embedding.element_size(), rows * nodes
        of_experts = hidden * size + (hidden + experts) * torch.float32.itemsize if experts else 0
        # Attention keeps, for each split of the keys, values, a maximum and a sum per head.
        reach = slots if 0 in self.windows else min(slots, max(self.windows) + nodes)
        splits = math.ceil(reach / SPLIT_KEYS)
        heads = queries // self.head_dim
        partials = count * splits * heads * (self.head_dim + 2)
        packed = min(count, PACKED_ROWS) * max(hidden, queries, inner)
        floats = min(partials, WAVE_FLOATS) + packed
        own = count * ((sum(widths) + kept) * size + of_experts)
        return own + floats * torch.float32.itemsize

    def table_bytes(self, slots: int) -> int:
        """The most bytes of the tables of rotations in a call that uses ``slots`` slots."""
        size = len(self.rotations) * self.head_dim * self.embedding.element_size()
        return 2 * TABLE_GROWTH * slots * size

    def _outs(self, layer: int) -> dict[str, int]:
        """Return the number of outputs of all matrices of a layer, of one expert for those of experts."""
        names = self.form.tensors
        outs = dict.fromkeys(LAYER_TENSORS, 0)
        for name, weight in zip(names, self.weights[layer * len(names) :], strict=False):
            is_transposed = self.form.transposed and weight.is_floating_point()
            if weight.ndim > 1:
                outs[name] = weight.shape[-1 if is_transposed else -2]
        return outs


def end_of_prompt(columns: int) -> str:
    """Return the kind of a pass over the last columns of a prompt: one for all lengths below a power of 2."""
    return f"end of a prompt of less than {1 << columns.bit_length()} columns"


def usable(model: PreTrainedModel, direct: DirectPass | None) -> DirectPass | None:
    """Return the direct pass of a model; None if something outside of the model rules it out now."""
    if (
        direct is None
        or False in _agreed.get(model, {}).values()
        or torch.is_autocast_enabled("cpu")
        or has_global_hooks()
        # Classes and functions can be replaced at any time.
        or not has_code_of(direct.family, direct.kinds)
        or (direct.form.top_k and not has_known_experts(model.config))
    ):
        return None
    return direct


def agrees(
    model: nn.Module, direct: DirectPass, kind: str, directly: Tensor, by_modules: Tensor
) -> bool:
    """Whether the logits of both ways differ by rounding only; remembered for this kind of passes."""
    error = relative_difference(directly, by_modules)
    if not math.isfinite(error):
        return False  # NaN or infinite logits prove nothing; not remembered
    agreed = _agreed.setdefault(model, {})
    tolerance = TOLERANCE_WITH_EXPERTS if direct.form.top_k else TOLERANCE
    agreed[kind] = error <= tolerance[by_modules.dtype]
    if not agreed[kind]:
        warnings.warn(
            f"{type(model).__name__} has the code of a supported decoder, but its logits differ from those "
            f"of the fused pass by {error:.2g} (relative). It is run module by module, which is slower. "
            f"Please report this, with the version of transformers, {transformers.__version__}",
            stacklevel=2,
        )
    return agreed[kind]


def is_agreed(model: nn.Module, kind: str) -> bool:
    """Whether both ways were compared for this kind of passes of the model and agreed."""
    return _agreed.get(model, {}).get(kind, False)
