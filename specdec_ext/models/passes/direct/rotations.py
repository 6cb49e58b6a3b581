"""``RotationTable``: the rotations of positions, computed once for all passes of a call.

A step of a small model takes less than a millisecond, of which computing the cosines and sines of its
positions would be a tenth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# A table that is too small becomes at least so many times as large.
TABLE_GROWTH = 2
# states, position ids -> cosines, sines
Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class RotationTable:
    """A rotation whose cosines and sines are read from a table, which grows with the positions.

    Args:
        rotation: computes them; those of a position may depend on nothing but the position.
    """

    def __init__(self, rotation: Rotation):
        self._rotation = rotation
        self._size = 0
        self._cosines = self._sines = torch.empty(0, device="cpu")

    def __call__(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[rows, nodes, rotary]`` cosines and sines.

        Args:
            states: tell the dtype and the device; the same in all calls.
            position_ids: ``[rows, nodes]``, not negative.
        """
        size = int(position_ids.max()) + 1
        if size > self._size:
            # The first pass reads the prompt, and may be the only one.
            size = max(size, TABLE_GROWTH * self._size)
            positions = torch.arange(size, device=position_ids.device)[None]
            cosines, sines = self._rotation(states, positions)
            self._size, self._cosines, self._sines = size, cosines[0], sines[0]
        return self._cosines[position_ids], self._sines[position_ids]
