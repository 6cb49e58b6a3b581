"""``RowLayout``: where the text of each active row lies in the slots of the cache.

Slots are the columns of ``generate``'s ``sequences``, including the padding of the prompt, which is marked
invalid. The prompt determines everything but the ends of the rows. Every block of tokens is written at one
common slot, the largest end; after it is verified, each row's accepted tokens move to the row's own end:

    slot          0  1  2  3  4  5  6  7  8
    row 0         a  b  c  d  e  f               first_slots 0, paddings 0, ends 6
    row 1         -  -  g  h  i                  first_slots 2, paddings 2, ends 5
    next block                      x  y  z      start 6

On the device, a step changes only ``numbers``, one tensor, and :meth:`RowLayout.move_ends` is the only place
that sets it. If the op ``round_commit`` has changed them, they need no copy (:mod:`.round_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import sub

import torch
from torch import Tensor

from specdec_ext.models.passes.prompt import Prompt
from specdec_ext.models.passes.row_numbers import RowNumbers
from specdec_ext.transfer import Staged, Staging


@dataclass
class RowLayout:
    """The slots of the active rows.

    Attributes:
        staging: copies the numbers of the rows to the device.
        slot_valid: ``[rows, slots]`` bool, False where a slot is padding.
        slot_positions: ``[rows, slots]`` int64, number of tokens before each slot.
        position_shift: ``[rows, axes]`` int64, difference between the model's positions and the number of
            tokens before; None if these are equal.
        first_slots: slot of each row's first token.
        paddings: number of padding slots of each row.
        padded: whether any row of the prompt has padding.
        holes: the largest number of padding slots after the first token of a row of the prompt.
        ends: number of slots that each row has filled, padding included; its next token goes to this slot.
        start: the largest end, where the next block is written.
        aligned: whether all rows end at ``start``.
        slack: number of slots by which windows must be extended (:class:`RollbackLayer`), because rows end at
            different slots and padding takes slots of a window.
    """

    staging: Staging
    slot_valid: Tensor
    slot_positions: Tensor
    position_shift: Tensor | None
    first_slots: list[int]
    paddings: list[int]
    padded: bool
    holes: int
    ends: list[int]
    start: int = field(init=False)
    aligned: bool = field(init=False)
    slack: int = field(init=False)

    @classmethod
    def of(
        cls, prompt: Prompt, max_slots: int, staging: Staging, position_ids: Tensor | None = None
    ) -> RowLayout:
        """Lay out the rows of a prompt, which fills the first slots of every row.

        Args:
            prompt: the text of the rows.
            max_slots: the most slots that the call may need, including the last block.
            staging: copies the numbers of the rows to the device.
            position_ids: ``[rows, columns]`` or ``[axes, rows, columns]`` positions of the prompt, if the
                model counts something else than the tokens before.
        """
        rows, columns = prompt.valid.shape
        future = torch.arange(max(0, max_slots + 1 - columns), device=prompt.valid.device)
        future = future.expand(rows, -1)
        lengths, first_slots = torch.stack([prompt.lengths, prompt.first]).tolist()
        shift = None
        if position_ids is not None:
            shift = (position_ids[..., -1] + 1 - prompt.lengths).view(-1, rows).T
        return cls(
            staging,
            torch.cat([prompt.valid, torch.ones_like(future).bool()], dim=1),
            torch.cat([prompt.positions, prompt.lengths[:, None] + future], dim=1),
            shift,
            first_slots,
            [columns - length for length in lengths],
            prompt.padded,
            prompt.holes,
            [columns] * rows,
        )

    def __post_init__(self) -> None:
        self.move_ends(self.ends)

    def move_ends(self, ends: list[int], on_device: Tensor | None = None) -> None:
        """Set the ends of the rows. Their numbers are part of the next copy to the device.

        Args:
            ends: the new ends.
            on_device: ``[5, rows]``, the new numbers, if they are on the device already.
        """
        start, shortest = max(ends), min(ends)
        self.ends, self.start = ends, start
        self.aligned = shortest == start
        self.slack = self.holes + start - shortest
        self._staged: Staged = self.staging.stage(
            [
                [*map(sub, ends, self.paddings)],
                ends,
                self.first_slots,
                [*map(sub, ends, self.first_slots)],
                [start] * len(ends),
            ],
            on_device,
        )
        self._numbers: RowNumbers | None = None

    @property
    def numbers(self) -> RowNumbers:
        """Positions and slots of the rows on the device."""
        if self._numbers is None:
            self._numbers = RowNumbers(*self.packed_numbers.unbind())
        return self._numbers

    @property
    def packed_numbers(self) -> Tensor:
        """``numbers`` as one tensor, ``[5, rows]``."""
        return self._staged.tensor

    def select(self, rows: Sequence[int], index: Tensor) -> RowLayout:
        """Return the layout whose row i is row ``rows[i]`` of this one; ``index`` is ``rows`` as a tensor."""
        shift = self.position_shift
        return replace(
            self,
            slot_valid=self.slot_valid[index],
            slot_positions=self.slot_positions[index],
            position_shift=None if shift is None else shift[index],
            first_slots=[self.first_slots[row] for row in rows],
            paddings=[self.paddings[row] for row in rows],
            ends=[self.ends[row] for row in rows],
        )

    def joined(self, other: RowLayout) -> RowLayout:
        """Return the layout with the rows of ``other`` after these rows; both have equally many slots."""
        assert self.position_shift is None and other.position_shift is None
        return replace(
            self,
            slot_valid=torch.cat([self.slot_valid, other.slot_valid]),
            slot_positions=torch.cat([self.slot_positions, other.slot_positions]),
            first_slots=self.first_slots + other.first_slots,
            paddings=self.paddings + other.paddings,
            padded=self.padded or other.padded,
            holes=max(self.holes, other.holes),
            ends=self.ends + other.ends,
        )

    def model_positions(self, positions: Tensor) -> Tensor:
        """Return ``position_ids`` of tokens with ``positions [rows, nodes]`` tokens before them.

        After a prompt with images they may be shifted, and may have several axes: ``[axes, rows, nodes]``.
        """
        if self.position_shift is None:
            return positions
        shifted = positions + self.position_shift.T[..., None]
        return shifted if len(shifted) > 1 else shifted[0]
