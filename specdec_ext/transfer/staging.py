"""``Staging``: integers on their way to the device, all that wait in one copy.

Every copy to a GPU costs a launch and, from memory that is not pinned, a wait. What a round of decoding knows
on the host (tokens, positions, lengths) is staged as soon as it is known; the first of it that is read on the
device takes the rest along.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Integers = Sequence[int] | Sequence[Sequence[int]] | Tensor


class Staged:
    """Integers that the host has and the device may ask for.

    Attributes:
        values: a list, a list of lists of equal length, or an int64 tensor on the CPU; not to be changed.
    """

    def __init__(self, staging: Staging, values: Integers):
        self.values = values
        self._staging = staging
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The same on the device, int64."""
        if self._tensor is None:
            self._staging.send(self)
        assert self._tensor is not None
        return self._tensor


class Staging:
    """What waits for the next copy to ``device``.

    On the CPU nothing waits: values become tensors when they are asked for, and those that nobody asks for
    never do.

    Attributes:
        waits: whether staging before it is needed is of use.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.waits = device.type != "cpu"
        self._waiting: list[Staged] = []

    def stage(self, values: Integers) -> Staged:
        """Let ``values`` go with the next copy."""
        staged = Staged(self, values)
        if self.waits:
            self._waiting.append(staged)
        return staged

    def send(self, asked: Staged) -> None:
        """Copy what is asked for, and all that waits."""
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
    return torch.from_numpy(np.array(values, dtype=np.int64))  # a fourth of torch.tensor's time
