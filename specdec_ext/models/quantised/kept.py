"""``kept``: what was made of a module's tensors, kept while these are unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

_T = TypeVar("_T")
# Module -> (the tensors, their versions, what was made of them).
_kept: WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[Tensor]], list[int], Any]] = (
    WeakKeyDictionary()
)


def kept(module: nn.Module, tensors: Sequence[Tensor], make: Callable[[], _T]) -> _T:
    """Return what ``make`` returned for these tensors of a module, made again if one was replaced or changed.

    The result must not refer to the module, which would then never be freed.
    """
    versions = [_version(each) for each in tensors]
    found = _kept.get(module)
    if found is not None:
        references, were, made = found
        if were == versions and all(
            reference() is each for reference, each in zip(references, tensors, strict=True)
        ):
            return made
    made = make()
    _kept[module] = [weakref.ref(each) for each in tensors], versions, made
    return made


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count it."""
    return -1 if tensor.is_inference() else tensor._version
