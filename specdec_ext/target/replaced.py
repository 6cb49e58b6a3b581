"""Replacing the ``forward`` of modules for a while, in one thread.

A replacement acts only in the thread that opened it; other threads that call the same modules meanwhile get
what the modules compute themselves. Afterwards the modules are as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

# compute(module, its own forward, *args, **kwargs) -> what forward returns
Compute = Callable[..., Any]
Replacement = tuple[Sequence[nn.Module], Compute]

_open: ContextVar[frozenset[Compute]] = ContextVar("specdec_replaced_forwards", default=frozenset())
_lock = threading.Lock()


class _Forward:
    """What stands in for ``forward`` of one module while any thread has it open."""

    def __init__(self, module: nn.Module, compute: Compute):
        self.module, self.compute = module, compute
        self.instance_forward = module.__dict__.get("forward")
        self.users = 0

    @property
    def own(self) -> Callable[..., Any]:
        if self.instance_forward is not None:
            return self.instance_forward
        return type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compute in _open.get():
            return self.compute(self.module, self.own, *args, **kwargs)
        return self.own(*args, **kwargs)

    def remove(self) -> None:
        if self.module.__dict__.get("forward") is not self:
            return  # somebody else has replaced ours meanwhile
        if self.instance_forward is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.instance_forward


def own_forward_replaced(module: nn.Module) -> bool:
    """Whether somebody else (an offloading library, say) has replaced this module's ``forward``."""
    forward = module.__dict__.get("forward")
    if type(forward) is _Forward:
        forward = forward.instance_forward
    return forward is not None


@contextmanager
def replaced_forward(modules: Sequence[nn.Module], compute: Compute) -> Iterator[None]:
    """Let ``compute`` stand in for the ``forward`` of these modules in this thread.

    Contexts may nest, and be open in several threads for the same modules; a module has one replacement.
    """
    opened: list[_Forward] = []
    with _lock:
        for module in modules:
            forward = module.__dict__.get("forward")
            if type(forward) is not _Forward:
                forward = module.__dict__["forward"] = _Forward(module, compute)
            forward.users += 1
            opened.append(forward)
    token = _open.set(_open.get() | {compute})
    try:
        yield
    finally:
        _open.reset(token)
        with _lock:
            for ours in opened:
                ours.users -= 1
                if ours.users == 0:
                    ours.remove()
