"""Cache layers of sparse attention (DSA, arXiv 2512.02556): the keys of the indexer are rolled back, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_ext.models.cache.layers import GROWTH, RollbackLayer
from specdec_ext.models.compat import index_positions


def is_indexed(layer: Any) -> bool:
    """Whether a cache layer keeps index keys: ``DynamicIndexedLayer``, MiniMax-M3's sparse layer,
    ``IndexedRollbackLayer``."""
    return hasattr(layer, "update_indexer") or hasattr(layer, "update_index")


def selects_by_slot(layer: Any) -> bool:
    """Whether attention over this transformers layer selects blocks by slot, whatever the slots contain.

    MiniMax-M3 compares slots with token positions, so even padding on the left shifts its selection.
    """
    return hasattr(layer, "update_index") and not hasattr(layer, "update_indexer")


class IndexedRollbackLayer(RollbackLayer):
    """A sparse-attention layer that keeps index keys in addition to keys and values.

    It replaces ``DynamicIndexedLayer`` and MiniMax-M3's layer, which have different names for index keys.

    Attributes:
        indexed: number of slots that hold index keys; rolled back with ``length``.
        indexer_position_ids: ``[dims, rows, length]`` positions that the model itself stores here.
    """

    _stores = (*RollbackLayer._stores, "index_buffer")

    def __init__(self, window: int | None = None):
        self.index_buffer: Any = None  # [rows, 1, capacity, dim], None until the first update
        self.indexed = 0
        self.indexer_position_ids: Tensor | None = None
        super().__init__(window)

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        self._length = value
        # A pass appends keys and index keys one after the other, so growing ``length`` adds no index keys.
        self.indexed = min(self.indexed, value)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :value]

    @property
    def idx_keys(self) -> Tensor | None:
        """Index keys ``[rows, 1, indexed, dim]`` under MiniMax-M3's name."""
        return None if self.index_buffer is None else self.index_buffer[:, :, : self.indexed]

    @idx_keys.setter
    def idx_keys(self, value: Tensor | None) -> None:
        self.index_buffer = value
        self.indexed = 0 if value is None else value.shape[2]

    @property
    def indexer_keys(self) -> Tensor | None:
        """Index keys ``[rows, indexed, dim]`` under the name of ``DynamicIndexedLayer``."""
        return None if self.idx_keys is None else self.idx_keys[:, 0]

    def reserve(self, slots: int) -> None:
        super().reserve(slots)
        old = self.index_buffer
        if old is not None and old.shape[2] < slots:
            self.index_buffer = self._allocate(old, slots + max(GROWTH, slots // 4))
            self.index_buffer[:, :, : old.shape[2]] = old

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Append ``[active rows, 1, new, dim]`` to the first rows; return the index keys of all slots."""
        if self.index_buffer is None:
            self.index_buffer = self._allocate(idx_k, self._first_capacity)
        start, stop = self.indexed, self.indexed + idx_k.shape[2]
        self.reserve(stop)
        rows = idx_k.shape[0]
        self.index_buffer[:rows, :, start:stop] = idx_k
        self.indexed = stop
        return self.index_buffer[:rows, :, :stop]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append ``[active rows, new, dim]`` to the first rows; return the index keys of all slots."""
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def write(self, row: int, begin: int, stored: Sequence[Tensor], num_rows: int) -> None:
        super().write(row, begin, stored, num_rows)
        if stored:
            self.indexed = max(self.indexed, begin + stored[0].shape[2])

    def _make_rows(self, like: Sequence[Tensor]) -> None:
        key, value, *index = like
        super()._make_rows((key, value))
        for each in index:  # none if the layer reads the selection of another one
            self.index_buffer = self._allocate(each, self._first_capacity)

    def take_index(self, layer: Any) -> None:
        """Copy the index keys of a filled transformers layer; keys and values have been copied already."""
        if hasattr(layer, "update_indexer"):
            if layer.indexer_keys is not None:
                self.update_indexer(layer.indexer_keys)
            self.indexer_position_ids = index_positions(layer)
        elif layer.idx_keys is not None:
            self.update_index(layer.idx_keys)

    def branch(self, origins: Tensor, slots: int) -> None:
        super().branch(origins, slots)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[:, origins]

    def join(self, rows: Tensor, slots: int) -> None:
        super().join(rows, slots)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[:, rows]

    def reset(self) -> None:
        super().reset()
        self.idx_keys = self.indexer_position_ids = None

    def _select_rows(self, rows: Tensor) -> None:
        if self.idx_keys is not None:
            self.idx_keys = self.idx_keys[rows]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[:, rows]

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.length:
            rows = torch.arange(len(self.key_buffer), device=self.key_buffer.device)
            self._select_rows(rows.repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)
