"""``CudaLike``: tensors that report device "cuda:0" but compute on the CPU, to count what a GPU would do.

A CPU build of torch can't hold CUDA tensors, and fake tensors have no values, which a decoding loop needs.
Here every tensor of the device is a wrapper around a CPU tensor with the values. Each call that reaches the
dispatcher is counted as what it would be on CUDA:

- *launch*: a kernel. Views and uninitialised memory need none. An op of ours counts as one.
- *to host*: a copy from the device, for which the host waits: ``item``, ``tolist``, ``bool``, ``.cpu()``, and
  calls that determine a size on the device (``nonzero``, indexing by a boolean mask).
- *from host*: a copy to the device: ``torch.tensor(..., device=...)``, ``.to(device)``, indexing by a list or
  a CPU tensor.

Tensors of both devices in one op raise an error, as on CUDA.

Use it in a separate process, and import it before the code to be measured: it replaces
``torch.inference_mode`` by ``torch.no_grad`` (wrappers can't be views of inference tensors), and makes torch
believe that CUDA was initialised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[assignment, misc]

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
LAUNCH, TO_HOST, FROM_HOST = KINDS = ("launch", "to host", "from host")
# Called with the kind and the place in our code, or in transformers, that made the call.
Book = Callable[[str, str], None]

_NO_KERNEL = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty",
    "empty_like", "empty_strided", "expand", "is_pinned", "lift_fresh", "narrow", "new_empty",
    "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view",
}  # fmt: skip
_READS_SIZE = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal", "_local_scalar_dense"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
_SOURCES = ("specdec_ext", "transformers")


class CudaLike(Tensor):
    """A tensor of the device; ``inner`` has its values."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> CudaLike:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device.call(func, args, kwargs or {})

    # Methods that torch implements in C++ below the dispatcher, or guards in a way that fails in a CPU build.

    def tolist(self) -> Any:
        _device.book(TO_HOST)
        return self.inner.tolist()

    def item(self) -> Any:
        _device.book(TO_HOST)
        return self.inner.item()

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> Tensor:
        if self.inner.is_contiguous(memory_format=memory_format):
            return self
        return self.clone(memory_format=memory_format)

    def nonzero(self, **kwargs: Any) -> Any:
        _device.book(TO_HOST)
        return tree_map(CudaLike, self.inner.nonzero(**kwargs))

    def __invert__(self) -> Tensor:
        return self.logical_not() if self.dtype == torch.bool else self.bitwise_not()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": DEVICE, **kwargs})

    def __getitem__(self, index: Any) -> Tensor:
        with _device.quiet():
            found = self.inner[_device.index(index)]
        if found._base is None and found.data_ptr() != self.inner.data_ptr():
            _device.book(LAUNCH)
        return CudaLike(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        _device.book(LAUNCH)
        if isinstance(value, Tensor) and not isinstance(value, CudaLike) and value.ndim:
            _device.book(FROM_HOST)
        with _device.quiet():
            self.inner[_device.index(index)] = _inner(value)


class _Device(TorchDispatchMode):
    """Counts calls and computes them on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.report: Book = lambda kind, site: None
        self._is_quiet = False

    def book(self, kind: str) -> None:
        self.report(kind, _site())

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Do not count calls inside this context: they are part of a call that was counted already."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def index(self, index: Any) -> Any:
        """Convert an index of a device tensor to one of its CPU tensor, and count the copies it needs."""
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
                self.book(TO_HOST)
            if isinstance(part, list) or (isinstance(part, Tensor) and part.device == CPU):
                self.book(FROM_HOST)
        return tree_map(_inner, index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._pin_memory.default and not self._is_quiet:
            return args[0]
        if self._is_quiet or not _concerns_device(args, kwargs):
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[1]
        given = tree_flatten((args, kwargs))[0]
        ours = {id(each.inner): each for each in given if isinstance(each, CudaLike)}
        others = [each for each in given if isinstance(each, Tensor) and each.device == CPU]
        target = kwargs.get("device")
        leaves = bool(ours) and target is not None and torch.device(target).type == "cpu"
        if name in ("_to_copy", "copy_", "_pin_memory") and (leaves or others):
            into_host = leaves or (name == "copy_" and not isinstance(args[0], CudaLike))
            self.book(TO_HOST if into_host else FROM_HOST)
            leaves = into_host
        elif name in _READS_SIZE or (name in _INDEXED and _has_mask(args[1])):
            self.book(TO_HOST)
        elif name not in _NO_KERNEL or not func._schema.name.startswith("aten"):
            self.book(LAUNCH)
        if name in _INDEXED:
            for _ in others:
                self.book(FROM_HOST)
        elif name not in ("_to_copy", "copy_") and any(each.ndim for each in others):
            raise RuntimeError(f"{name} was given tensors of {DEVICE} and of the CPU")
        args, kwargs = tree_map(_inner, (args, kwargs))
        with self.quiet():
            result = func(*args, **kwargs)

        def outer(value: Any) -> Any:
            if not isinstance(value, Tensor) or leaves:
                return value
            known = ours.get(id(value))  # an in-place op returns its argument
            return CudaLike(value) if known is None else known

        return tree_map(outer, result)


_device = _Device()


def _inner(value: Any) -> Any:
    if isinstance(value, CudaLike):
        return value.inner
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _concerns_device(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(
        isinstance(each, CudaLike) or (isinstance(each, torch.device) and each.type == "cuda")
        for each in tree_flatten((args, kwargs))[0]
    )


def _has_mask(indices: Any) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _site() -> str:
    """``folder/file.py:line function`` of the innermost frame in the measured code."""
    frame = sys._getframe(2)
    while frame is not None:
        place = _place(frame.f_code.co_filename)
        if place is not None:
            return f"{place}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@cache
def _place(filename: str) -> str | None:
    """The path from the package in ``_SOURCES`` on; None for other files."""
    parts = Path(filename).parts
    for source in _SOURCES:
        if source in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(source) :])
    return None


def _made_on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``torch.tensor`` or ``torch.as_tensor``, which copy to the device below the dispatcher."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return make(data, *args, device=device, **kwargs)
        if isinstance(data, CudaLike):
            return data
        _device.book(FROM_HOST)
        with _device.quiet():
            return CudaLike(make(data, *args, **kwargs))

    return made


@contextmanager
def cuda_like(report: Book) -> Iterator[None]:
    """Allow tensors on :data:`DEVICE` within this context; ``report`` is called for each counted call."""
    patches = (
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(
            torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)
        ),
        mock.patch.object(torch, "tensor", _made_on_host(torch.tensor)),
        mock.patch.object(torch, "as_tensor", _made_on_host(torch.as_tensor)),
    )
    _device.report = report
    for patch in patches:
        patch.start()
    try:
        with _device, torch.no_grad():
            yield
    finally:
        for patch in reversed(patches):
            patch.stop()


def to_device(module: nn.Module) -> nn.Module:
    """Put the parameters and buffers of a module on the device, in place."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved = nn.Parameter(CudaLike(parameter.detach()), requires_grad=False)
                part._parameters[name] = moved
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = CudaLike(buffer)
    return module
