"""What a draft head has read of each row: its keys and values, and what was committed since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_ext.head import HeadConfig
from specdec_ext.rope import rope_tables

# Caches and tables grow by at least this many, so that they are seldom copied.
STEP = 1024


@dataclass
class Elements:
    """Committed text of some rows that the head has not read yet.

    Element i of a row is (token, feature of the token before it).

    Attributes:
        rows: original numbers.
        tokens: ``[rows, new]`` int64.
        features: ``[rows, new, width]``.
        counts: of each row, how many of them are text.
    """

    rows: list[int]
    tokens: Tensor
    features: Tensor
    counts: list[int]


def of_active_rows(pending: Sequence[Elements], active: list[int], num_rows: int) -> Elements:
    """Elements of several steps one behind the other, for every row of the batch; none for ended rows."""
    if len(pending) == 1 and pending[0].rows == active == list(range(num_rows)):
        return pending[0]
    pieces: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_rows)]
    for part in pending:
        for i, (row, count) in enumerate(zip(part.rows, part.counts, strict=True)):
            if row in active:
                pieces[row].append((part.tokens[i, :count], part.features[i, :count]))
    counts = [sum(len(tokens) for tokens, _ in row) for row in pieces]
    like = pending[0]
    tokens = like.tokens.new_zeros(num_rows, max(counts))
    features = like.features.new_zeros(num_rows, max(counts), like.features.shape[2])
    for row, (count, parts) in enumerate(zip(counts, pieces, strict=True)):
        if parts:
            tokens[row, :count] = torch.cat([piece for piece, _ in parts])
            features[row, :count] = torch.cat([piece for _, piece in parts])
    return Elements(list(range(num_rows)), tokens, features, counts)


class HeadCache:
    """The keys and values of all rows of a call, and the tables of positions.

    Rows stay where they are when others end: a row without new elements costs nothing.

    Attributes:
        keys, values: ``[layers, rows, kv_heads, capacity, head_dim]``.
        cosines, sines: ``[positions, rotary / 2]`` float32.
        lengths: committed elements of each row.
        first_positions: position of each row's first element: not 0 where a caller's cache held the text
            before it, whose features nobody has.
    """

    def __init__(
        self,
        config: HeadConfig,
        first_positions: list[int],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._config = config
        self.lengths = [0] * len(first_positions)
        self.first_positions = first_positions
        size = config.num_layers, len(first_positions), config.num_kv_heads, 0, config.head_dim
        self.keys = torch.empty(size, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.cosines = self.sines = torch.empty(0, device=device)

    def reserve(self, new: Sequence[int], room: int, depth: int) -> None:
        """Make place for ``new`` elements per row and a draft of ``room`` slots and ``depth`` positions."""
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

    def positions(self) -> list[int]:
        """Position of each row's next element."""
        return [a + b for a, b in zip(self.first_positions, self.lengths, strict=True)]


def _grown(buffer: Tensor, used: int, capacity: int) -> Tensor:
    grown = buffer.new_empty(*buffer.shape[:3], capacity, buffer.shape[4])
    grown[:, :, :, :used] = buffer[:, :, :, :used]
    return grown
