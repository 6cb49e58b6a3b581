"""Change arguments and attributes that a model's modules see; shared by the patches in ``families/``."""

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


def bound_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of a call of a module's own ``forward`` by name."""
    return _signature(type(module).forward).bind(module, *args, **kwargs)


def innermost_taking(model: nn.Module, argument: str) -> list[nn.Module]:
    """Return the modules whose ``forward`` takes ``argument`` and that have no inner module taking it."""
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
    """Call ``forward(*args, **kwargs)`` with some arguments replaced.

    Args:
        module: the module that ``forward`` belongs to.
        forward: the module's own forward.
        args, kwargs: of the original call.
        change: maps all arguments by name to the new values of those to replace.
    """
    bound = bound_arguments(module, args, kwargs)
    bound.arguments.update(change(bound.arguments))
    return forward(*bound.args[1:], **bound.kwargs)


def with_attributes(module: nn.Module, **attributes: Any) -> Any:
    """Return a shallow copy of a module with some attributes replaced; the original does not change."""
    other = object.__new__(type(module))
    vars(other).update(vars(module), **attributes)
    return other


class Sliced:
    """A stand-in for a tensor that a model slices for the current pass.

    Args:
        slice: the result of any indexing; it may have dimensions for rows or queries that the tensor lacks.
        shape: the shape that the model sees.
    """

    def __init__(self, slice: Tensor, shape: torch.Size):
        self._slice = slice
        self.shape = shape

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, index: Any) -> Tensor:
        return self._slice
