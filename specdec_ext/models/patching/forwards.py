"""Replace the ``forward`` of modules temporarily, in one thread.

A replacement is active only in the thread that opened it, and while it is open. Other threads that call the
same modules run the original forward. After the call the modules are as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import nn

from specdec_ext.models.patching.changes import binding, joined_changes

# compute(module, its own forward, *args, **kwargs) -> what forward returns
Compute = Callable[..., Any]
Replacement = tuple[Sequence[nn.Module], Compute]

_open: ContextVar[frozenset[Compute]] = ContextVar("specdec_replaced_forwards", default=frozenset())


class _Forward:
    """The value of a module's ``forward`` attribute while any call may replace its forward."""

    def __init__(self, module: nn.Module, compute: Compute, instance_forward: Any):
        self.module, self.compute, self.instance_forward = module, compute, instance_forward

    @property
    def own(self) -> Callable[..., Any]:
        if self.instance_forward is not None:
            return self.instance_forward
        return type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compute in _open.get():
            return self.compute(self.module, self.own, *args, **kwargs)
        return self.own(*args, **kwargs)


def own_forward_replaced(module: nn.Module) -> bool:
    """Whether other software, such as an offloading library, has replaced this module's ``forward``."""
    forward = module.__dict__.get("forward")
    while type(forward) is _Forward:
        forward = forward.instance_forward
    return forward is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` or ``module.forward = torch.compile(module.forward)`` was called."""
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


@contextmanager
def replaced_forward(modules: Sequence[nn.Module], compute: Compute) -> Iterator[None]:
    """Replace the ``forward`` of these modules by ``compute`` in this thread.

    Contexts may be nested, and several threads may open them for the same modules; a module has one
    replacement. Within a call, the modules are prepared once for all contexts that get the same sequence.
    """
    with joined_changes() as changes:
        changes.patch(
            (compute, id(modules)),
            lambda: [(vars(each), "forward", partial(_Forward, each, compute)) for each in modules],
        )
        with binding(_open, _open.get() | {compute}):
            yield
