"""``HeadCache``: the key-value cache of a draft head and its rope tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from specdec_ext.heads.config import HeadConfig
from specdec_ext.heads.rope import rope_tables
from specdec_ext.ops import DraftNoise, RoundNumbers
from specdec_ext.transfer import Staging
from specdec_ext.tree.config import TreeConfig

# Caches and tables grow by at least this many entries, so that they are rarely copied.
STEP = 1024


class HeadCache:
    """The keys and values of all rows of a call, and the rope tables.

    Rows keep their places when others end; a row without new elements costs nothing. All tensors stay where
    they are until a text needs more room, so that recorded rounds can use them. A recording keeps the cache
    alive for later calls (:meth:`BoundHead.cache_for`).

    Attributes:
        keys, values: ``[layers, rows, kv_heads, capacity, head_dim]``.
        cosines, sines: ``[positions, rotary / 2]`` float32.
        lengths: number of elements of each row.
        first_positions: position of each row's first element. It is not 0 if the caller's cache held earlier
            text, whose features are unknown.
        noise: the noise for drafts of all rows; None for drafts without noise.
        owner: a reference to what uses the cache.
    """

    owner: Callable[[], object]

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
        self.noise: DraftNoise | None = None
        self._noise = DraftNoise(
            torch.zeros(num_rows, device=device),
            *torch.zeros(2, num_rows, dtype=torch.long, device=device),
        )
        # First positions; then the active rows, followed by the others.
        self._numbers = torch.zeros(2, num_rows, dtype=torch.long, device=device)
        self._known: list[list[int]] = []  # ``_numbers`` on the host
        size = config.num_layers, num_rows, config.num_kv_heads, 0, config.head_dim
        self.keys = torch.empty(size, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.cosines = self.sines = torch.empty(0, device=device)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def memory(self) -> tuple[object, ...]:
        """The tensors that a draft reads and writes, and what keeps them for later calls."""
        buffers = self.keys, self.values, self.cosines, self.sines
        return (self, *buffers)

    def begin(self, noise: DraftNoise | None) -> None:
        """Begin a call, without elements."""
        self.clear(range(self.num_rows))
        self.set_noise(noise)

    def set_noise(self, noise: DraftNoise | None) -> None:
        """Draft with the noise of these rows from now on."""
        self.noise = None if noise is None else self._noise
        if noise is not None:
            for own, given in zip(self._noise, noise, strict=True):
                own[:] = given

    def stage(self, rows: list[int], staging: Staging) -> None:
        """Copy to the device what has changed of the first positions and the active rows."""
        others = [row for row in range(self.num_rows) if row not in rows]
        values = [list(self.first_positions), rows + others]
        if values != self._known:
            self._numbers[:] = staging.stage(values).tensor
            self._known = values

    def after_round(self, numbers: RoundNumbers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the head reads after a round, on the device: ``[rows]`` each, for all rows.

        The head has read the text before the round, so its length follows from the text's. Rows that are not
        active have no new elements.

        Args:
            numbers: of the active rows, which were staged.

        Returns:
            Counts of new elements, lengths, positions of the first new elements, and roots.
        """
        firsts, rows = self._numbers
        rows = rows[: len(numbers.counts)]
        counts, roots = (
            torch.zeros_like(firsts).index_copy_(0, rows, each)
            for each in (numbers.counts, numbers.roots)
        )
        before = numbers.root_positions - numbers.counts
        positions = firsts.index_copy(0, rows, before)
        return counts, positions - firsts, positions, roots

    def of_all_rows(self, values: Tensor) -> Tensor:
        """``[all rows, ...]`` with ``values [active rows, ...]``, and zeros for the others."""
        rows = self._numbers[1, : len(values)]
        return values.new_zeros(self.num_rows, *values.shape[1:]).index_copy_(0, rows, values)

    def of_active_rows(self, values: Tensor, active: int) -> Tensor:
        """The inverse of :meth:`of_all_rows`."""
        return values[self._numbers[1, :active]]

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

    def clear(self, rows: Iterable[int]) -> None:
        """Remove the elements of these rows."""
        for row in rows:
            self.lengths[row] = self.first_positions[row] = 0

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
