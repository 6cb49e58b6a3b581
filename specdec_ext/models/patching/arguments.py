"""Changing one argument on its way into a model's modules: what positions.py, alibi.py and local.py share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@functools.cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def takes(module: nn.Module, argument: str) -> bool:
    """Whether the class of a module has a ``forward`` with this parameter."""
    return argument in _signature(type(module).forward).parameters


def innermost_taking(model: nn.Module, argument: str) -> list[nn.Module]:
    """Modules whose ``forward`` takes ``argument`` and that hand it on to no other: they compute with it."""
    kinds = {type(module): module for module in model.modules()}
    if not any(takes(module, argument) for module in kinds.values()):
        return []
    return [
        module
        for module in model.modules()
        if [inner for inner in module.modules() if takes(inner, argument)] == [module]
    ]


def call_with(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> Any:
    """``forward(*args, **kwargs)`` with some arguments replaced.

    Args:
        module: the module that ``forward`` belongs to.
        change: from all arguments by name to those that are to be different.
    """
    bound = _signature(type(module).forward).bind(module, *args, **kwargs)
    bound.arguments.update(change(bound.arguments))
    return forward(*bound.args[1:], **bound.kwargs)


def twin(module: nn.Module, **attributes: Any) -> Any:
    """The same module but for some attributes, which other threads go on reading in the original."""
    other = object.__new__(type(module))
    vars(other).update(vars(module), **attributes)
    return other


class Sliced:
    """Stands in for a tensor of which a model takes the slice of this pass.

    Args:
        slice: what any indexing gives; with rows or queries that the tensor has no dimension for.
        shape: what the model is told the tensor's shape to be.
    """

    def __init__(self, slice: Tensor, shape: torch.Size):
        self._slice = slice
        self.shape = shape

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, index: Any) -> Tensor:
        return self._slice
