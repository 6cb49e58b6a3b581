"""``HeadCache``: the key-value cache of a draft head and its rope tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext.heads.config import HeadConfig
from specdec_ext.heads.rope import rope_tables
from specdec_ext.tree.config import TreeConfig

# Caches and tables grow by at least this many entries, so that they are rarely copied.
STEP = 1024


class HeadCache:
    """The keys and values of all rows of a call, and the rope tables.

    Rows keep their places when others end; a row without new elements costs nothing.

    Attributes:
        keys, values: ``[layers, rows, kv_heads, capacity, head_dim]``.
        cosines, sines: ``[positions, rotary / 2]`` float32.
        lengths: number of elements of each row.
        on_device: ``[2, rows]``, lengths and positions of the next elements; None before the first draft.
        first_positions: position of each row's first element. It is not 0 if the caller's cache held earlier
            text, whose features are unknown.
    """

    def __init__(
        self,
        config: HeadConfig,
        num_rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._config = config
        self.lengths = [0] * num_rows
        self.first_positions = [0] * num_rows
        self.on_device: Tensor | None = None
        size = config.num_layers, num_rows, config.num_kv_heads, 0, config.head_dim
        self.keys = torch.empty(size, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.cosines = self.sines = torch.empty(0, device=device)

    def reserve(self, new: Sequence[int], room: int, depth: int) -> None:
        """Make room for ``new`` elements per row and a draft of ``room`` slots and ``depth`` positions."""
        filled = [length + count for length, count in zip(self.lengths, new, strict=True)]
        slots = max(filled) + room
        if slots > self.keys.shape[3]:
            used = max(self.lengths)
            self.keys, self.values = (
                _grown(buffer, used, slots + STEP) for buffer in (self.keys, self.values)
            )
        ends = [first + slot for first, slot in zip(self.first_positions, filled, strict=True)]
        positions = max(ends) + depth
        if positions > len(self.cosines):
            tables = rope_tables(self._config, positions + STEP)
            self.cosines, self.sines = (table.to(self.keys.device) for table in tables)

    def clear(self, rows: Sequence[int]) -> None:
        """Remove the elements of these rows."""
        for row in rows:
            self.lengths[row] = 0

    def count(self, new: Sequence[int]) -> None:
        """Note on the host how many elements of each row were added."""
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]

    def positions(self) -> list[int]:
        """Position of each row's next element."""
        return [a + b for a, b in zip(self.first_positions, self.lengths, strict=True)]


def draft_slots(tree: TreeConfig) -> int:
    """Number of cache slots for drafted nodes: the depth times the width of the widest level."""
    if tree.choices is None:
        return tree.top_k * tree.depth
    return max(Counter(map(len, tree.choices)).values()) * tree.depth


def _grown(buffer: Tensor, used: int, capacity: int) -> Tensor:
    grown = buffer.new_empty(*buffer.shape[:3], capacity, buffer.shape[4])
    grown[:, :, :, :used] = buffer[:, :, :, :used]
    return grown
