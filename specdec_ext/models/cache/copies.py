"""Copies of caches of any kind: transformers' own, those of a model's own class, tuples of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

# Types in caches that hold no tensors.
_NO_TENSORS = (bool, int, float, str, type, torch.dtype, torch.device, PreTrainedConfig)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy a cache of any kind with ``change`` applied to its tensors; one-dimensional ones are counters and
    only copied.

    Raises:
        TypeError: for an object that may hold tensors in an unknown way.
    """
    if value is None or isinstance(value, _NO_TENSORS):
        return value
    if isinstance(value, Tensor):
        return change(value) if value.ndim > 1 else value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(each, change) for each in value])
    if callable(value) or not (isinstance(value, dict) or hasattr(value, "__dict__")):
        raise TypeError(f"a cache with a {type(value).__name__} in it")
    other = copy.copy(value)
    inside = other if isinstance(value, dict) else vars(other)
    inside.update({name: mapped(each, change) for name, each in inside.items()})
    return other


def has_row_dimension(caches: dict[str, Any]) -> bool:
    """Whether the first dimension of every tensor in these caches of a single row is known to be the rows."""
    known = []

    def see(tensor: Tensor) -> Tensor:
        known.append(type(tensor) is Tensor and tensor.shape[0] == 1)
        return tensor

    try:
        mapped(caches, see)
    except TypeError:
        return False
    return all(known)


def restored(cache: Any, saved: Any) -> Any:
    """Restore ``saved`` into ``cache`` if that is a transformers cache, which may be the caller's object;
    otherwise return ``saved``."""
    if not isinstance(cache, Cache):
        return saved
    vars(cache).clear()
    vars(cache).update(vars(saved))
    return cache
