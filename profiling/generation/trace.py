"""``Trace``: the calls that reach torch's dispatcher, recorded to be counted and compared.

One record answers two questions:

- what a round asks of a GPU: launches, copies, waits (count_round.py counts calls by ``kind``);
- whether two rounds make the same calls, so that a CUDA graph of the first computes the second:
  :func:`differences`.

A CUDA graph repeats launches with the addresses, shapes and numbers of the captured round. Memory that was
allocated during the capture belongs to the graph, so two rounds may allocate at different addresses. A trace
keeps all its tensors alive, as the memory pool of a graph does. An address therefore stands for one tensor.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAUNCH, TO_HOST, FROM_HOST = KINDS = ("launch", "to host", "from host")
NO_LAUNCH = "no launch"
# Causes of a difference between two traces.
NUMBER, ADDRESS, SHAPE, SIZE, ORDER = "number", "address", "shape", "size", "order"
_SOURCES = ("specdec_ext", "transformers")
_HIDDEN = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent)


@dataclass(frozen=True)
class Call:
    """One call on tensors of the device.

    Attributes:
        name: name of the op or of the Python method.
        kind: ``LAUNCH``, ``TO_HOST`` or ``FROM_HOST``; ``NO_LAUNCH`` for views, for uninitialised memory, and
            for the parts of a copy that was reported itself.
        site: place in the code that made the call, see :func:`call_site`.
        args, kwargs, result: the arguments of the op and its result; empty if a copy does not reach the
            dispatcher.
        on_host: arguments that are tensors on the host.
    """

    name: str
    kind: str
    site: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None
    on_host: tuple[Tensor, ...] = ()

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The op and the shapes of its arguments and results."""
        tensors = _tensors((self.args, self.kwargs, self.result))
        return self.name, *(tuple(each.shape) for each in tensors)


Report = Callable[[Call], object]


class Trace:
    """The calls of one round or pass, with all their tensors.

    Attributes:
        calls: in the order of execution.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def add(self, call: Call) -> None:
        self.calls.append(call)

    def count(self, kind: str) -> int:
        return sum(call.kind == kind for call in self.calls)


@dataclass(frozen=True)
class Difference:
    """A call that a graph of the first round would not repeat as the second round needs it.

    Attributes:
        cause: ``NUMBER``: another Python number. ``ADDRESS``: a tensor from outside the trace is at another
            address. ``SHAPE``: such a tensor has another shape. ``SIZE``: the result has another shape, which
            was determined on the device. ``ORDER``: another op follows.
        name: name of the op.
        site: place in the code that made the call.
        what: the two values.
        index: number of the call.
    """

    cause: str
    name: str
    site: str
    what: str
    index: int

    def __str__(self) -> str:
        return f"call {self.index}, {self.name}: {self.what}, at {self.site}"


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies. ``source`` is the address of memory from outside the trace, or (call, output)."""

    source: int | tuple[int, int]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Memory:
    """Names memory by the call that allocated it, and knows which tensors the calls so far have made."""

    def __init__(self) -> None:
        self._allocated: dict[int, tuple[int, int]] = {}
        self._made: set[int] = set()

    def made(self, tensor: Tensor) -> bool:
        """Whether a call made this tensor; a view of memory from outside counts as well."""
        return id(tensor) in self._made

    def place(self, tensor: Tensor) -> _Place:
        address = _address(tensor)
        source = self._allocated.get(address, address)
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        return _Place(source, *layout)

    def add(self, index: int, call: Call) -> None:
        given = _tensors((call.args, call.kwargs))
        ids, addresses = {id(each) for each in given}, {_address(each) for each in given}
        for output, tensor in enumerate(_tensors(call.result)):
            if id(tensor) not in ids:  # an in-place op returns its argument
                self._made.add(id(tensor))
            if _address(tensor) and _address(tensor) not in addresses:
                self._allocated.setdefault(_address(tensor), (index, output))


def differences(first: Trace, second: Trace) -> Iterator[Difference]:
    """Compare two traces call by call, and yield the causes of launches and copies that differ.

    A difference of a view counts if a launch reads the view. A call whose arguments differ only because an
    earlier call differed is not a cause. At the first call that is another op, the comparison ends. Both
    traces must be alive while the second one is recorded.
    """
    memories = _Memory(), _Memory()
    causes: dict[int, set[Difference]] = {}  # id of a tensor of the first trace -> why it differs
    told: set[Difference] = set()
    for index, (one, two) in enumerate(zip(first.calls, second.calls, strict=False)):
        if one.name != two.name or one.site != two.site:
            what = f"{two.name} at {two.site} in its place"
            yield Difference(ORDER, one.name, one.site, what, index)
            return
        given = _tensors((one.args, one.kwargs))
        found = set[Difference]().union(*(causes.get(id(each), ()) for each in given))
        own = _difference(one, two, *memories)
        if own is not None:
            found.add(Difference(own[0], one.name, one.site, own[1], index))
        if found:
            causes |= {id(result): found for result in _tensors(one.result)}
        if one.kind != NO_LAUNCH:
            yield from sorted(found - told, key=lambda each: each.index)
            told |= found
        for memory, call in zip(memories, (one, two), strict=True):
            memory.add(index, call)
    lengths = len(first.calls), len(second.calls)
    if lengths[0] != lengths[1]:
        last = max(first.calls, second.calls, key=len)[min(lengths)]
        what = f"{lengths[0]} calls became {lengths[1]}"
        yield Difference(ORDER, last.name, last.site, what, min(lengths))


def _difference(one: Call, two: Call, *memories: _Memory) -> tuple[str, str] | None:
    """Cause and description of a difference that begins at this call."""
    leaves = [leaves_of((call.args, call.kwargs)) for call in (one, two)]
    if len(leaves[0]) != len(leaves[1]):
        return NUMBER, f"{len(leaves[0])} arguments became {len(leaves[1])}"
    numbers, reshaped = [], False
    for old, new in zip(*leaves, strict=True):
        if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
            if repr(old) != repr(new):
                numbers.append(f"{old!r} became {new!r}")
            continue
        if any(old is each for each in one.on_host):
            if not torch.equal(old, new):
                numbers.append("a tensor on the host has other values")
            continue
        was, now = memories[0].place(old), memories[1].place(new)
        if memories[0].made(old) and memories[1].made(new):
            reshaped |= (was.shape, was.strides) != (now.shape, now.strides)
        elif (was.source, was.offset) != (now.source, now.offset):
            return ADDRESS, f"an argument of shape {list(now.shape)} is at another address"
        elif was != now:
            return SHAPE, f"an argument of shape {list(was.shape)} has shape {list(now.shape)}"
    if reshaped:
        return None  # numbers and sizes may follow from the shape
    if numbers:
        return NUMBER, numbers[0]
    shapes = [[list(each.shape) for each in _tensors(call.result)] for call in (one, two)]
    if shapes[0] != shapes[1]:
        return SIZE, f"results of shapes {shapes[0]} became {shapes[1]}"
    return None


# torch's pytrees take other containers too, but a third of the time of a counted round.
def leaves_of(value: Any) -> list[Any]:
    """The values in nested tuples, lists and mappings, in order."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return [value]
    return [leaf for each in value for leaf in leaves_of(each)]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to the values in nested tuples, lists and mappings, and keep the containers."""
    if isinstance(value, Mapping):
        return {name: map_leaves(function, each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([map_leaves(function, each) for each in value])
    return function(value)


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in leaves_of(value) if isinstance(each, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def call_site() -> str:
    """``folder/file.py:line function`` of the innermost frame in the measured packages.

    For a call that comes from neither of them, the innermost frame outside of torch, Python and this folder.
    """
    frame, other = sys._getframe(1), "elsewhere"
    while frame is not None:
        place, measured = _place(frame.f_code.co_filename)
        if place is not None:
            site = f"{place}:{frame.f_lineno} {frame.f_code.co_name}"
            if measured:
                return site
            other = site if other == "elsewhere" else other
        frame = frame.f_back  # type: ignore[assignment]
    return other


@cache
def _place(filename: str) -> tuple[str | None, bool]:
    """The path to show, and whether it is in a package of ``_SOURCES``; None for files that are not shown."""
    path = Path(filename)
    parts = path.parts
    for source in _SOURCES:
        if source in parts[:-1]:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(source) :]), True
    hidden = not path.is_absolute() or any(folder in path.parents for folder in _HIDDEN)
    return (None if hidden else path.name), False
