"""``ReplayGraph``: does on the CPU what a CUDA graph does on a GPU, so that recordings can be tested there.

A CUDA graph calls no Python. It repeats the launches of the first run with the addresses, shapes and numbers
that they had, and leaves the results where the first run left them. So anything that Python would do
differently in a later round shows in the text.
"""

from __future__ import annotations

from typing import Any

import torch
from generation.trace import leaves_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_ext.models.graphs.graph import Graph, NotRecordableError

_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


class _Calls(TorchDispatchMode):
    """Keeps the calls that reach the dispatcher, with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _WAITS:
            raise NotRecordableError(f"{func._schema.name} waits for the device")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class ReplayGraph(Graph):
    """Takes the place of ``HostGraph``.

    Attributes:
        replays: number of runs that called no Python, of all graphs.
    """

    replays = 0

    def __init__(self) -> None:
        self._calls = _Calls()
        self._is_recorded = False

    def run(self, function: Any) -> Any:
        if not self._is_recorded:
            self._calls.calls.clear()
            with self._calls:
                self._value = function()
            return self._value
        ReplayGraph.replays += 1
        with torch.inference_mode():
            for func, args, kwargs, result in self._calls.calls:
                _repeat(func, args, kwargs, result)
        return self._value

    def record(self, function: Any) -> None:
        self._is_recorded = True


def _repeat(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Make a call again, and write its results where they were."""
    given = {_address(each) for each in _tensors((args, kwargs))}
    kept = _tensors(result)
    changes = func._schema.is_mutable
    if not changes and all(_address(each) in given for each in kept):
        return  # a view
    for old, new in zip(kept, _tensors(func(*args, **kwargs)), strict=True):
        if _address(old) not in given:
            old.copy_(new)


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in leaves_of(value) if isinstance(each, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
