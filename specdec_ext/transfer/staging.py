"""``Staging``: copies many small groups of integers to the device at once.

Every copy to a GPU costs a launch and, if the memory is not pinned, a wait. So the integers of a round
(tokens, positions, lengths) are staged as soon as the host knows them. When the first of them is needed on
the device, all staged integers are copied together.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

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

    def __init__(self, staging: Staging, values: Integers, on_device: Tensor | None):
        self.values = values
        self._staging = staging
        self._tensor = on_device

    @property
    def tensor(self) -> Tensor:
        """The integers on the device, int64. The first access copies all that are staged."""
        if self._tensor is None:
            self._staging.send(self)
        assert self._tensor is not None
        return self._tensor


class Latest:
    """Integers that change from round to round, and are staged only if they have changed.

    Args:
        staging: copies them.
    """

    def __init__(self, staging: Staging):
        self._staging = staging
        self._staged: Staged | None = None

    def of(self, values: list[int], on_device: Tensor | None = None) -> Staged:
        """Stage ``values``, unless they are the latest ones or are ``on_device``."""
        if self._staged is None or on_device is not None or self._staged.values != values:
            self._staged = self._staging.stage(values, on_device)
        return self._staged

    def forget(self) -> None:
        """Stage the next values, even if they are equal: the latest ones are not on the device any more."""
        self._staged = None


class Staging:
    """Collects integers for the next copy to ``device``.

    On the CPU there is no copy; values become tensors when they are needed. Values to which nothing refers
    any more are not copied, so values that only may be needed can be staged in every round.

    Attributes:
        waits: whether values wait for a common copy, so that it is useful to stage them early.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.waits = device.type != "cpu"
        self._waiting: list[ref[Staged]] = []

    def stage(self, values: Integers, on_device: Tensor | None = None) -> Staged:
        """Add ``values`` to the next copy, unless they are ``on_device`` already."""
        staged = Staged(self, values, on_device)
        if self.waits and on_device is None:
            self._waiting = [*filter(_is_alive, self._waiting), ref(staged)]
        return staged

    def send(self, asked: Staged) -> None:
        """Copy ``asked`` together with everything else that is staged."""
        if not self.waits:
            asked._tensor = _on_host(asked.values)
            return
        waiting = [staged for each in self._waiting if (staged := each()) is not None]
        self._waiting = []
        parts = [_on_host(each.values) for each in waiting]
        packed = torch.cat([part.flatten() for part in parts])
        if self.device.type == "cuda":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        else:
            packed = packed.to(self.device)
        pieces = packed.split([part.numel() for part in parts])
        for staged, part, piece in zip(waiting, parts, pieces, strict=True):
            staged._tensor = piece.view(part.shape)


def _is_alive(staged: ref[Staged]) -> bool:
    return staged() is not None


def _on_host(values: Integers) -> Tensor:
    if isinstance(values, Tensor):
        return values
    return torch.from_numpy(np.array(values, dtype=np.int64))  # four times as fast as torch.tensor
