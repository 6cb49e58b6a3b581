"""``CudaLike``: tensors that report device "cuda:0" but compute on the CPU, to count what a GPU would do.

A CPU build of torch can't hold CUDA tensors, and fake tensors have no values, which a decoding loop needs.
Here every tensor of the device is a wrapper around a CPU tensor with the values. Each call that reaches the
dispatcher is reported (:class:`~generation.trace.Call`) as what it would be on CUDA:

- *launch*: a kernel. Views and uninitialised memory need none. An op of ours counts as one.
- *to host*: a copy from the device, for which the host waits: ``item``, ``tolist``, ``bool``, ``.cpu()``, and
  calls that determine a size on the device (``nonzero``, indexing by a boolean mask). A copy without waiting
  is a launch; waiting for an event after it is *to host*.
- *from host*: a copy to the device: ``torch.tensor(..., device=...)``, ``.to(device)``, indexing by a list or
  a CPU tensor.

Tensors of both devices in one op raise an error, as on CUDA.

Within :func:`cuda_like`, ``torch.inference_mode`` is ``torch.no_grad``, because wrappers can't be views of
inference tensors. torch believes that CUDA was initialised, on a GPU of compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from generation.trace import (
    FROM_HOST,
    LAUNCH,
    NO_LAUNCH,
    TO_HOST,
    Call,
    Report,
    call_site,
    leaves_of,
    map_leaves,
)
from specdec_ext.models.graphs import arena
from specdec_ext.models.graphs.graph import Graph

T = TypeVar("T")
DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
CAPABILITY = (9, 0)

_NO_KERNEL = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty",
    "empty_like", "empty_strided", "expand", "is_pinned", "lift_fresh", "narrow", "new_empty",
    "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view",
}  # fmt: skip
_READS_SIZE = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal", "_local_scalar_dense"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Ops that take integers on CUDA only.
_IN_FLOAT = {"histc"}


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
        _device.asked(TO_HOST, "tolist")
        return self.inner.tolist()

    def item(self) -> Any:
        _device.asked(TO_HOST, "item")
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
        _device.asked(TO_HOST, "nonzero")
        with _device.parts(counted=False):
            return map_leaves(CudaLike, self.inner.nonzero(**kwargs))

    def __invert__(self) -> Tensor:
        return self.logical_not() if self.dtype == torch.bool else self.bitwise_not()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": DEVICE, **kwargs})

    def __getitem__(self, index: Any) -> Tensor:
        with _device.parts():
            return CudaLike(self.inner[_device.index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, Tensor) and not isinstance(value, CudaLike) and value.ndim:
            _device.asked(FROM_HOST, "__setitem__")
        with _device.parts():
            self.inner[_device.index(index)] = _inner(value)


class _Device(TorchDispatchMode):
    """Reports calls and computes them on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.report: Report = lambda call: None
        self._parts: bool | None = None

    def asked(self, kind: str, name: str) -> None:
        """Report a call that does not reach the dispatcher, or not as a whole."""
        self.report(Call(name, kind, call_site()))

    @contextmanager
    def parts(self, counted: bool = True) -> Iterator[None]:
        """Report calls on CPU tensors inside this context, which are the parts of one Python call.

        Args:
            counted: whether they count as launches; False if the Python call is reported as a copy.
        """
        before, self._parts = self._parts, counted
        try:
            yield
        finally:
            self._parts = before

    def index(self, index: Any) -> Any:
        """Convert an index of a device tensor to one of its CPU tensor, and report the copies it needs."""
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
                self.asked(TO_HOST, "index by a mask")
            if isinstance(part, list) or (isinstance(part, Tensor) and part.device == CPU):
                self.asked(FROM_HOST, "index from the host")
        return map_leaves(_inner, index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._parts is not None:
            kind = LAUNCH if self._parts and _has_kernel(func) else NO_LAUNCH
            return self.run(func, args, kwargs, kind)
        if func is torch.ops.aten._pin_memory.default:
            return args[0]
        if not _concerns_device(args, kwargs):
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def run(
        self, func: Any, args: Any, kwargs: dict[str, Any], kind: str, on_host: Any = ()
    ) -> Any:
        """Compute a call on the CPU tensors of the device, and report it."""
        result = func(*args, **kwargs)
        name = func._schema.name
        self.report(Call(name, kind, call_site(), args, kwargs, result, tuple(on_host)))
        return result

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[1]
        given = leaves_of((args, kwargs))
        ours = {id(each.inner): each for each in given if isinstance(each, CudaLike)}
        others = [each for each in given if isinstance(each, Tensor) and each.device == CPU]
        target = kwargs.get("device")
        leaves = bool(ours) and target is not None and torch.device(target).type == "cpu"
        kind = NO_LAUNCH
        if name in ("_to_copy", "copy_", "_pin_memory") and (leaves or others):
            leaves = leaves or (name == "copy_" and not isinstance(args[0], CudaLike))
            kind = TO_HOST if leaves else FROM_HOST
            if leaves and kwargs.get("non_blocking"):
                kind = LAUNCH  # the host waits later, for an event
        elif name in _READS_SIZE or (name in _INDEXED and _has_mask(args[1])):
            kind = TO_HOST
        elif _has_kernel(func):
            kind = LAUNCH
        if name in _INDEXED:
            for _ in others:
                self.asked(FROM_HOST, "index from the host")
        elif name not in ("_to_copy", "copy_") and any(each.ndim for each in others):
            raise RuntimeError(f"{name} was given tensors of {DEVICE} and of the CPU")
        args, kwargs = map_leaves(_inner, (args, kwargs))
        if name in _IN_FLOAT:
            convert = torch.ops.aten._to_copy.default
            converted = self.run(convert, (args[0],), {"dtype": torch.float32}, NO_LAUNCH)
            args = (converted, *args[1:])
        result = self.run(func, args, kwargs, kind, others)

        def outer(value: Any) -> Any:
            if not isinstance(value, Tensor) or leaves:
                return value
            known = ours.get(id(value))  # an in-place op returns its argument
            return CudaLike(value) if known is None else known

        return map_leaves(outer, result)


_device = _Device()


class FakeEvent:
    """Stands for a CUDA event: waiting for it counts as a copy to the host, which it ends."""

    def synchronize(self) -> None:
        _device.asked(TO_HOST, "synchronize")


class FakeGraph(Graph):
    """Stands for a CUDA graph: every run calls the function and is reported as one launch.

    Attributes:
        inside: gets the calls of the function, which a graph would record.
    """

    inside: ClassVar[Report] = staticmethod(lambda call: None)

    def __init__(self, device: torch.device, pool: Any):
        pass

    def run(self, function: Callable[[], T]) -> T:
        _device.asked(LAUNCH, "graph launch")
        with reporting(FakeGraph.inside):
            return function()

    def record(self, function: Callable[[], object]) -> None:
        pass


def _inner(value: Any) -> Any:
    if isinstance(value, CudaLike):
        return value.inner
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _concerns_device(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(
        isinstance(each, CudaLike) or (isinstance(each, torch.device) and each.type == "cuda")
        for each in leaves_of((args, kwargs))
    )


def _has_kernel(func: Any) -> bool:
    space, name = func._schema.name.split("::")
    return space != "aten" or name not in _NO_KERNEL


def _has_mask(indices: Any) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _made_on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``torch.tensor`` or ``torch.as_tensor``, which copy to the device below the dispatcher."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return make(data, *args, device=device, **kwargs)
        if isinstance(data, CudaLike):
            return data
        _device.asked(FROM_HOST, make.__name__)
        with _device.parts(counted=False):
            return CudaLike(make(data, *args, **kwargs))

    return made


@contextmanager
def cuda_like(report: Report = lambda call: None) -> Iterator[None]:
    """Allow tensors on :data:`DEVICE` within this context; ``report`` gets every call on them."""
    patches = (
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        mock.patch.object(
            torch.cuda,
            "current_stream",
            lambda device: SimpleNamespace(cuda_stream=0, record_event=FakeEvent),
        ),
        mock.patch.object(torch.cuda, "graph_pool_handle", lambda: (0, 0)),
        mock.patch.object(arena, "CudaGraph", FakeGraph),
        mock.patch.object(torch, "inference_mode", lambda mode=True: torch.no_grad()),
        mock.patch.object(torch, "tensor", _made_on_host(torch.tensor)),
        mock.patch.object(torch, "as_tensor", _made_on_host(torch.as_tensor)),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(_device)
        stack.enter_context(torch.no_grad())
        stack.enter_context(reporting(report))
        yield


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Within :func:`cuda_like`: let ``report`` get the calls inside this context."""
    before, _device.report = _device.report, report
    try:
        yield
    finally:
        _device.report = before


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
