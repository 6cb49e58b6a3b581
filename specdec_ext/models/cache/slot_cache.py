"""``SlotCache``: the cache of one call, whose layers are laid out and rolled back together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from specdec_ext import ops
from specdec_ext.models import compat
from specdec_ext.models.cache.adoption import adopt_cache
from specdec_ext.models.cache.layers import RollbackLayer
from specdec_ext.models.cache.states import States
from specdec_ext.models.compat import LinearAttentionCacheLayerMixin


class SlotCache:
    """Keys and values in slots, and recurrent states, of all layers of a model.

    Args:
        cache: the caller's cache or None; its layers are replaced in place.
        config: the text config of the model.

    Attributes:
        cache: the ``DynamicCache`` that the model reads and writes.
        layers: its layers with keys and values.
        states: the recurrent states of its layers; false if no layer has any.
        window: the sliding window of the layers with keys and values if all have the same one, else None.

    Raises:
        ValueError: for an unsupported cache; the message names it and the way out.
    """

    def __init__(self, cache: Cache | None, config: PreTrainedConfig):
        self.cache = adopt_cache(cache, config)
        self.take_layers()

    def take_layers(self) -> None:
        """List the layers of the cache; models that run layers in loops append some in their first pass."""
        layers = self.cache.layers
        self.layers = [each for each in layers if isinstance(each, RollbackLayer)]
        self.states = States([x for x in layers if isinstance(x, LinearAttentionCacheLayerMixin)])
        windows = {layer.window for layer in self.layers}
        self.window = windows.pop() if len(windows) == 1 else None

    def extend(self, layers: Sequence[Any]) -> None:
        """Append what another cache of the same model has more, as empty layers.

        Models that run layers in loops have appended them there in their first pass.
        """
        self.cache.layers += [emptied(each) for each in layers[len(self.cache.layers) :]]
        self.take_layers()

    @property
    def length(self) -> int:
        """Number of slots that hold keys."""
        return max((layer.length for layer in self.layers), default=0)

    def reserve(self, slots: int, slack: int) -> None:
        """Grow the buffers to at least ``slots`` slots, and set the slack of windows (``RollbackLayer``)."""
        for layer in self.layers:
            layer.reserve(slots)
            layer.slack = slack

    def set_length(self, slots: int, slack: int) -> None:
        """Set the number of filled slots, and the slack of windows."""
        for layer in self.layers:
            layer.length, layer.slack = slots, slack
        compat.cut_positions(self.cache, slots)

    def buffers(self, rows: int) -> list[Tensor]:
        """The first rows of everything that is stored by slot, each ``[rows, heads, capacity, dim]``."""
        return [buffer[:rows] for layer in self.layers for buffer in layer.buffers]

    def compact(self, path: Tensor, num_accepted: Tensor, starts: Tensor, ends: Tensor) -> None:
        """Move each row's accepted nodes from its block to the end of the row, on every device with layers.

        Args:
            path, num_accepted: as in ``ops.kv_compact``.
            starts: ``[rows]`` slot of node 0 of the block.
            ends: ``[rows]`` slot to which node 0 moves.
        """
        buffers = self.buffers(len(path))
        for device in {buffer.device for buffer in buffers}:
            ops.kv_compact(
                [buffer for buffer in buffers if buffer.device == device],
                *(each.to(device) for each in (path, num_accepted, starts, ends)),
            )

    def move_rows(self, to: Tensor, source: Tensor) -> None:
        """Copy the slots of row ``source[i]`` to row ``to[i]``, for all i at once."""
        for layer in self.layers:
            layer.move_rows(to, source)

    def adopt(self, row: int, other: SlotCache, num_rows: int) -> None:
        """Copy the slots of the only row of ``other``, of the same model, to row ``row`` of ``num_rows``."""
        self.extend(other.cache.layers)
        self.write(row, 0, other.read(0, other.length), num_rows)
        for buffer in self.buffers(row + 1):
            buffer[row, :, other.length :] = 0  # an earlier row may have left NaN, see _allocate

    def read(self, begin: int, end: int) -> list[list[Tensor]]:
        """Slots of the first row, for each layer as :meth:`RollbackLayer.read` returns them."""
        return [layer.read(begin, end) for layer in self.layers]

    def write(
        self, row: int, begin: int, stored: Sequence[Sequence[Tensor]], num_rows: int
    ) -> None:
        """Write to one row, from slot ``begin`` on, what :meth:`read` returned for the same model."""
        for layer, each in zip(self.layers, stored, strict=True):
            layer.write(row, begin, each, num_rows)

    def branch(self, origins: Tensor, slots: int) -> None:
        """Make row i a copy of row ``origins[i]`` with room for ``slots`` more; :meth:`join` undoes this."""
        for layer in self.layers:
            layer.branch(origins, slots)

    def join(self, rows: Tensor, slots: int) -> None:
        """Restore the rows from before :meth:`branch`; row i gets the new slots of branch ``rows[i]``."""
        for layer in self.layers:
            layer.join(rows, slots)

    def clear(self, ends: Sequence[int], stop: int | None = None) -> None:
        """Zero the slots from ``ends[r]`` to ``stop`` of each row r: rejected tokens may have left NaN there.

        Masked slots do no harm during the call, because ``tree_attention`` does not read them. The caller's
        next use of the cache may read them.
        """
        for buffer in (buffer for layer in self.layers for buffer in layer.buffers):
            for row, end in enumerate(ends):
                buffer[row, :, end:stop] = 0


def emptied(layer: Any) -> Any:
    """Return an empty layer for the slots of ``layer``; a layer without slots is returned itself."""
    return type(layer)(layer.window) if isinstance(layer, RollbackLayer) else layer
