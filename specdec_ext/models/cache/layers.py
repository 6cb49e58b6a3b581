"""Key/value cache layers that can be rolled back: transformers' cache layers over preallocated buffers.

A layer has buffers ``[rows, heads, capacity, dim]`` whose first ``length`` slots are in use. A chain is
rolled back by reducing ``length``; the accepted path of a tree is compacted in the buffers by ``kv_compact``.
A sliding-window layer keeps its whole history, so rolling back is free there, too. It returns the last
``window - 1 + slack`` slots and the new ones to attention, and the mask applies the exact window.

``adoption.py`` puts these layers into the caller's own ``DynamicCache`` object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from specdec_ext.models.compat import (
    CACHE,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    cropped_length,
)
from specdec_ext.models.patching.changes import inference_mode

# Smallest number of slots by which a buffer grows: reallocation stays rare without doubling the memory.
GROWTH = 256


class RollbackLayer(DynamicLayer):
    """Keys and values of one attention layer in preallocated buffers.

    Attributes:
        length: number of slots that hold keys; the value of ``get_seq_length``.
        window: the sliding window in tokens, or None for full attention.
        slack: number of slots before the window that attention must also see: rows of a ragged batch end at
            different slots, and padding between a row's tokens takes slots of its window.
        dropped: number of slots at the front whose keys were already dropped when the layer was adopted.
        block_slots: ``[nodes]`` slots to which the next pass writes; then it sees the whole buffers, and
            ``length`` does not change. None: the next slots. Set for passes of fixed shape (``graphs/``).
    """

    is_croppable = True
    _stores: tuple[str, ...] = ("key_buffer", "value_buffer")

    def __init__(self, window: int | None = None):
        self.key_buffer: Any = None  # [rows, heads, capacity, dim], None until the first update
        self.value_buffer: Any = None
        self.length = 0
        super().__init__()
        self.window = window
        self.slack = 0
        self.dropped = 0
        self.block_slots: Tensor | None = None
        self._first_capacity = 0
        self.is_sliding = window is not None

    @property
    def keys(self) -> Tensor | None:
        return None if self.key_buffer is None else self.key_buffer[:, :, : self.length]

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        # Cache.reorder_cache, batch_select_indices and batch_repeat_interleave assign here.
        self.key_buffer = value
        self.length = 0 if value is None else value.shape[2]

    @property
    def values(self) -> Tensor | None:
        return None if self.value_buffer is None else self.value_buffer[:, :, : self.length]

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self.value_buffer = value

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.key_buffer = self._allocate(key_states, self._first_capacity)
        self.value_buffer = self._allocate(value_states, self._first_capacity)
        self.is_initialized = True

    def reserve(self, slots: int) -> None:
        """Grow the buffers to at least ``slots`` slots; the contents stay."""
        if self.key_buffer is None or self.value_buffer is None:
            self._first_capacity = max(self._first_capacity, slots)
            return
        if self.key_buffer.shape[2] >= slots:
            return
        for name in ("key_buffer", "value_buffer"):
            old = getattr(self, name)
            grown = self._allocate(old, slots + max(GROWTH, slots // 4))
            grown[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, grown)

    @staticmethod
    def _allocate(like: Tensor, slots: int) -> Tensor:
        rows, heads, _, dim = like.shape
        # Zeros, because an unused slot is masked with weight 0, but NaN times 0 is NaN. Not in inference
        # mode, because the cache outlives the call and others could not write to it.
        with inference_mode(False):
            return torch.zeros(rows, heads, slots, dim, dtype=like.dtype, device=like.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[active rows, heads, new, dim]`` to the first rows; return the visible keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = key_states.shape[0]
        if self.block_slots is not None:
            keys, values = self.key_buffer[:rows], self.value_buffer[:rows]
            keys.index_copy_(2, self.block_slots, key_states)
            values.index_copy_(2, self.block_slots, value_states)
            return keys, values
        start, stop = self.length, self.length + key_states.shape[2]
        self.reserve(stop)
        self.key_buffer[:rows, :, start:stop] = key_states
        self.value_buffer[:rows, :, start:stop] = value_states
        self.length = stop
        first = self._first_visible(start)
        return self.key_buffer[:rows, :, first:stop], self.value_buffer[:rows, :, first:stop]

    def _first_visible(self, length: int) -> int:
        return 0 if self.window is None else max(0, length - (self.window - 1) - self.slack)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.block_slots is not None:
            return self.key_buffer.shape[2], 0
        first = self._first_visible(self.length)
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        # All layers have the same length; a layer for images stays empty if there are none (Mllama).
        return 0 if self.key_buffer is None else self.length

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def crop(self, tokens_to_remove: int) -> None:
        """Discard the last ``-tokens_to_remove`` slots (a negative number, as in transformers 5.23)."""
        length = cropped_length(self.length, tokens_to_remove)
        reach = 0 if self.window is None else length - (self.window - 1)
        if self.dropped and reach < self.dropped < length:
            raise ValueError(
                f"this sliding-window layer had dropped its first {self.dropped} tokens before it was passed "
                f"in. Cropped to {length} tokens, its window of {self.window} would reach back to them; run "
                f"the whole text without {CACHE}"
            )
        self.length = length

    def reset(self) -> None:
        # The buffers are freed, too: the next text may have another number of rows.
        self.key_buffer = self.value_buffer = None
        self.is_initialized = False
        self.length = self.slack = self.dropped = 0

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors that are stored by slot, each ``[rows, heads, capacity, dim]``."""
        stored = (getattr(self, name) for name in self._stores)
        return [buffer for buffer in stored if buffer is not None]

    def move_rows(self, to: Tensor, source: Tensor) -> None:
        """Copy row ``source[i]`` to row ``to[i]``, for all i at once."""
        for buffer in self.buffers:
            # These ops copy whole rows; an assignment to buffer[to] would go number by number.
            moved = buffer.index_select(0, source.to(buffer.device))
            buffer.index_copy_(0, to.to(buffer.device), moved)

    def read(self, begin: int, end: int) -> list[Tensor]:
        """Slots of the first row, for each of ``buffers`` ``[1, heads, end - begin, dim]``, as views."""
        return [buffer[:1, :, begin:end] for buffer in self.buffers]

    def write(self, row: int, begin: int, stored: Sequence[Tensor], num_rows: int) -> None:
        """Write to one row, from slot ``begin`` on, what a layer of the same model has ``read``.

        Afterwards there are at least ``num_rows`` rows.
        """
        if not stored:
            return
        if not self.is_initialized:
            self._make_rows([each.expand(num_rows, -1, -1, -1) for each in stored])
        elif len(self.key_buffer) < num_rows:
            self._add_rows(num_rows)
        end = begin + stored[0].shape[2]
        self.reserve(end)
        for buffer, new in zip(self.buffers, stored, strict=True):
            buffer[row, :, begin:end] = new[0]

    def _make_rows(self, like: Sequence[Tensor]) -> None:
        """Make empty buffers for rows like these."""
        key, value = like
        self.lazy_initialization(key, value)

    def _add_rows(self, num_rows: int) -> None:
        """Grow the buffers to ``num_rows`` rows; the contents stay."""
        for name in self._stores:
            if (old := getattr(self, name)) is not None:
                with inference_mode(False):  # as in _allocate
                    empty = old.new_zeros(num_rows - len(old), *old.shape[1:])
                    setattr(self, name, torch.cat([old, empty]))

    def branch(self, origins: Tensor, slots: int) -> None:
        """Make row i a copy of row ``origins[i]`` with room for ``slots`` more; :meth:`join` undoes this."""
        stop = self.length + slots
        self.reserve(stop)
        self._trunk = {name: getattr(self, name) for name in self._stores}
        for name, buffer in self._trunk.items():
            if buffer is not None:
                setattr(self, name, buffer[:, :, :stop].index_select(0, origins.to(buffer.device)))

    def join(self, rows: Tensor, slots: int) -> None:
        """Restore the rows from before :meth:`branch`; row i gets the new slots of branch ``rows[i]``."""
        new = slice(self.length - slots, self.length)
        for name, buffer in self._trunk.items():
            if buffer is not None:
                branches = getattr(self, name)
                buffer[: len(rows), :, new] = branches[rows.to(buffer.device), :, new]
            setattr(self, name, buffer)
        self._trunk = {}


class RollbackStateLayer(  # type: ignore[misc, override]
    LinearAttentionAndFullAttentionLayer, LinearAttentionLayer, RollbackLayer
):
    """A layer with recurrent states and with keys and values in slots.

    Its base class tells transformers that it attends and can be asked for mask sizes.

    Args:
        window: the sliding window in tokens, or None for full attention.
        number_of_states: as in ``LinearAttentionLayer``.
    """

    is_compileable = False

    def __init__(self, window: int | None, number_of_states: int):
        RollbackLayer.__init__(self, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # Attention calls this with two tensors, recurrent states with keyword arguments.
        if args:
            RollbackLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        return RollbackLayer.get_max_length(self)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a layer with recurrent states can't be cropped, because states can't be undone; run the whole "
            f"text without {CACHE}"
        )

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        RollbackLayer.reset(self)

    def reorder_cache(self, beam_idx: Any) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        RollbackLayer.reorder_cache(self, beam_idx)
