"""``LiveBytes``: how much memory the tensors of a computation take at most, without computing anything.

On the meta device, an operation only derives the shape of its result. The memory of all results that are
alive at the same time is therefore known without data, for any model that torch can run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Shape(NamedTuple):
    """What an operation needs to know of a tensor to derive the shape of its result."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of all tensors that are created while it is entered, as long as they are alive.

    An operation on shapes that it has seen before is not derived again: its results are empty tensors of the
    shapes found then. The layers of a model have mostly the same shapes, and torch derives many of them in
    Python, which takes most of the time of a pass.

    Args:
        known: tensors that exist already, such as weights; views of them are not counted.

    Attributes:
        peak: the largest sum so far.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self._live = self.peak = 0
        self._seen: dict[Any, Any] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        results = self._results(func, args, kwargs or {})
        for each in tree_leaves(results):
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return results

    def _results(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if not _makes_new_tensors(func):
            return func(*args, **kwargs)
        key = func, _described((args, kwargs))
        if key in self._seen:
            return self._seen[key].empty()
        results = func(*args, **kwargs)
        if isinstance(results, Tensor) and results.is_meta:
            shape, storage = _Shape.of(results), results.untyped_storage()
            # Some operations, such as _unsafe_view, return a part of other memory without telling it.
            is_new = storage._cdata not in self._sizes
            if is_new and storage.nbytes() == shape.empty().untyped_storage().nbytes():
                self._seen[key] = shape
        return results

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._live += self._sizes[key]
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key)


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Whether an operation has a result in memory of its own, and changes no argument."""
    schema = func._schema
    return not schema.is_mutable and all(each.alias_info is None for each in schema.returns)


def _described(value: Any) -> Any:
    """Arguments of an operation as a key; equal numbers of different types are different keys."""
    if isinstance(value, Tensor):
        return _Shape.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, Mapping):
        return tuple((name, _described(each)) for name, each in value.items())
    return type(value), value
