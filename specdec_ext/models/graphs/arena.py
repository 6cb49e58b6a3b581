"""``Arena``: the keys and values of one model at addresses that stay the same over calls.

A recorded pass contains the addresses of the buffers that it reads and writes. A model has one arena, which
one call at a time borrows: its cache layers use the arena's buffers from the first recorded pass on, and get
buffers of their own again at the end of the call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.models.cache.layers import RollbackLayer
from specdec_ext.models.graphs.graph import CudaGraph, Graph, HostGraph
from specdec_ext.models.graphs.recorded import RecordedPass, RecordedRound
from specdec_ext.models.patching.changes import Lock, inference_mode

if TYPE_CHECKING:
    from specdec_ext.models.slots.round_state import RoundState

# The number of slots of an arena is a multiple of this, so that calls of similar lengths share recordings.
SLOTS = 1024


class Arena:
    """Buffers for all layers of a model, and the passes that were recorded over them.

    Args:
        layers: filled cache layers, which give the shapes, dtypes and devices.
        slots: smallest number of slots.

    Attributes:
        keys, values: a buffer ``[rows, heads, slots, dim]`` for each layer.
        passes: (rows, nodes, what else changes a pass) -> recorded pass.
        rounds: (key of its pass, what else changes a round) -> recorded round.
        uses: the same keys -> number of passes or rounds of this kind before the recording.
        fingerprint: identifies the state of the model in which the passes were recorded.
        pool: memory pool of the recorded passes, None on the CPU.
    """

    def __init__(self, layers: Sequence[RollbackLayer], slots: int, fingerprint: Hashable):
        self.slots = -(-slots // SLOTS) * SLOTS
        self.keys = [self._buffer(layer.key_buffer) for layer in layers]
        self.values = [self._buffer(layer.value_buffer) for layer in layers]
        self.passes: dict[Hashable, RecordedPass] = {}
        self.rounds: dict[Hashable, RecordedRound] = {}
        self.uses: dict[Hashable, int] = {}
        self.fingerprint = fingerprint
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    def _buffer(self, like: Tensor) -> Tensor:
        rows, heads, _, dim = like.shape
        with inference_mode(False):  # as the buffers of a RollbackLayer
            return torch.zeros(rows, heads, self.slots, dim, dtype=like.dtype, device=like.device)

    def new_pass(self, rows: int, nodes: int) -> RecordedPass:
        """A pass over these buffers that has not been recorded yet."""
        return RecordedPass(self._new_graph(), rows, nodes, self.slots, self.device)

    def new_round(self, memory: Sequence[object]) -> RecordedRound:
        """A round over these buffers and ``memory`` that has not been recorded yet."""
        return RecordedRound(self._new_graph(), memory)

    def _new_graph(self) -> Graph:
        return HostGraph() if self.pool is None else CudaGraph(self.device, self.pool)

    def fits(self, layers: Sequence[RollbackLayer], slots: int) -> bool:
        """Whether these layers, with this number of slots, fit into the buffers."""

        def kind(buffer: Tensor) -> tuple[object, ...]:
            return buffer.shape[1], buffer.shape[3], buffer.dtype, buffer.device

        return (
            slots <= self.slots
            and len(layers) == len(self.keys)
            and len(layers[0].key_buffer) <= len(self.keys[0])
            and all(
                kind(own) == kind(buffer)
                for layer, *pair in zip(layers, self.keys, self.values, strict=True)
                for own, buffer in zip(layer.buffers, pair, strict=True)
            )
        )

    def lend(self, layers: Sequence[RollbackLayer]) -> None:
        """Copy the contents of the layers into the arena's buffers, and let the layers use these."""
        for layer, key, value in zip(layers, self.keys, self.values, strict=True):
            rows, used = len(layer.key_buffer), slice(0, layer.length)
            for buffer, own in ((key, layer.key_buffer), (value, layer.value_buffer)):
                buffer[:rows, :, used] = own[:, :, used]
            layer.key_buffer, layer.value_buffer = key[:rows], value[:rows]

    def lends_to(self, layers: Sequence[RollbackLayer]) -> bool:
        """Whether these layers use the buffers, and not larger ones that they have grown since."""
        return all(
            layer.key_buffer.data_ptr() == key.data_ptr()
            for layer, key in zip(layers, self.keys, strict=True)
        )


def take_back(layers: Sequence[RollbackLayer]) -> None:
    """Give the layers buffers of their own, with a copy of what they hold."""
    for layer in layers:
        with inference_mode(False):
            layer.key_buffer, layer.value_buffer = (
                buffer[:, :, : layer.length].clone() for buffer in layer.buffers
            )


class Lender:
    """What the calls of one model borrow, one call at a time.

    Attributes:
        arena: the arena, None before the first recording.
        state: the state of the rows of recorded rounds, None before the first call that commits rounds.
        lock: is held by the call that borrows them.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.state: RoundState | None = None
        self.lock = Lock()


_lenders: WeakKeyDictionary[PreTrainedModel, Lender] = WeakKeyDictionary()


def lender_of(model: PreTrainedModel) -> Lender:
    """The lender of a model, which lives as long as the model."""
    return _lenders.setdefault(model, Lender())


def free_graphs(model: PreTrainedModel) -> None:
    """Free the arena of a model with its recorded passes; the next call makes them anew."""
    _lenders.pop(model, None)
