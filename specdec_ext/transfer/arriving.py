"""``Arriving``: a copy from the device to the host for which the host does not wait until it is read."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Arriving:
    """Values on their way to the host.

    On CUDA the copy follows the work that is queued now, and later work does not delay it.

    Attributes:
        on_device: a tensor on any device. It may be overwritten by work that is queued later.
    """

    def __init__(self, values: Tensor):
        self.on_device = values
        on_cuda = values.device.type == "cuda"
        self._values = values.to("cpu", non_blocking=on_cuda, copy=True)
        self._done = torch.cuda.current_stream(values.device).record_event() if on_cuda else None

    @cached_property
    def values(self) -> Tensor:
        """The values on the CPU; the first access waits for them."""
        if self._done is not None:
            self._done.synchronize()
        return self._values
