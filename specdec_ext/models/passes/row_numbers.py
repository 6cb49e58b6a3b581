"""``RowNumbers``: the numbers of a step that say where each row's text lies in the cache."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowNumbers(NamedTuple):
    """Positions and slots of the rows, ``[rows]`` int64 each on the device.

    Attributes:
        root_positions: position of the next token.
        ends: slot after the last token; ``commit`` moves the next token to it.
        first_slots: slot of the first token.
        lengths: number of slots from the first token to the last.
        block_starts: slot of node 0 of the next block, the same for all rows.
    """

    root_positions: Tensor
    ends: Tensor
    first_slots: Tensor
    lengths: Tensor
    block_starts: Tensor
