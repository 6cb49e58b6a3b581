"""``Staging``: copies many small groups of integers to the device at once.

Every copy to a GPU costs a launch and, if the memory is not pinned, a wait. So the integers of a round
(tokens, positions, lengths) are staged as soon as the host knows them. When the first of them is needed on
the device, all staged integers are copied together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Integers = Sequence[int] | Sequence[Sequence[int]] | Tensor


class Staged:
    """Integers that are known on the host and may be needed on the device.

    Attributes:
        values: a list, a list of lists of equal length, or an int64 tensor on the CPU. They must not be
            modified.
    """

    def __init__(self, staging: Staging, values: Integers):
        self.values = values
        self._staging = staging
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The integers on the device, int64. The first access copies all that are staged."""
        if self._tensor is None:
            self._staging.send(self)
        assert self._tensor is not None
        return self._tensor


class Staging:
    """Collects integers for the next copy to ``device``.

    On the CPU there is no copy; values become tensors when they are needed.

    Attributes:
        waits: whether values wait for a common copy, so that it is useful to stage them early.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.waits = device.type != "cpu"
        self._waiting: list[Staged] = []

    def stage(self, values: Integers) -> Staged:
        """Add ``values`` to the next copy."""
        staged = Staged(self, values)
        if self.waits:
            self._waiting.append(staged)
        return staged

    def send(self, asked: Staged) -> None:
        """Copy ``asked`` together with everything else that is staged."""
        if not self.waits:
            asked._tensor = _on_host(asked.values)
            return
        waiting, self._waiting = self._waiting, []
        parts = [_on_host(each.values) for each in waiting]
        packed = torch.cat([part.flatten() for part in parts])
        if self.device.type == "cuda":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        else:
            packed = packed.to(self.device)
        pieces = packed.split([part.numel() for part in parts])
        for staged, part, piece in zip(waiting, parts, pieces, strict=True):
            staged._tensor = piece.view(part.shape)


def _on_host(values: Integers) -> Tensor:
    if isinstance(values, Tensor):
        return values
    return torch.from_numpy(np.array(values, dtype=np.int64))  # four times as fast as torch.tensor
