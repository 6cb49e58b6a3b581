"""Devices on which the CUDA kernels of every op run in the emulator (csrc/testing/emulation).

On "emulated" the host's compiler has compiled the kernels. On "ptx-sm_80" and "ptx-sm_90" nvcc has compiled
them to PTX for these GPUs, which is translated to C++ (build_support/ptx). All have the same launchers and
the same checks. The PTX devices are slow; a fast test on "emulated" that is the first to launch a kernel also
runs on FAST_PTX.

An op runs in three thread orders (forward, backward and shuffled) on copies of its arguments. The results
must have the same bits: without a necessary barrier, one of the orders gives another result. With
the runtime of AddressSanitizer and UBSan loaded, as in ``make test``, the library with sanitizers is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.places import ROOT
from torch import Tensor

from specdec_ext.ops import _library, packed_head

THREAD_ORDERS = ("forward", "backward", "shuffled")
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
TARGET = "emulated-sanitized" if SANITIZED else "emulated"
BUILD = ROOT / "build" / "native"
TENSOR_CORES = ("exact", "ampere", "hopper")  # csrc/testing/emulation/numerics/tensor_core.h
PTX = ("ptx-sm_80", "ptx-sm_90")
FAST_PTX = "ptx-sm_90"
_PARAMS = {
    "emulated": pytest.param("emulated", marks=pytest.mark.emulated),
    **{name: pytest.param(name, marks=[pytest.mark.emulated, pytest.mark.ptx]) for name in PTX},
}
# Only the kernel of draft_head differs below sm_90: nvcc's PTX of all others is the same for both families,
# which python_tests/ptx/test_ptx_bugs.py checks.
PARAMS = [_PARAMS["emulated"], _PARAMS["ptx-sm_90"]]
DRAFT_HEAD_PARAMS = [*_PARAMS.values()]


@cache
def has_ptx() -> bool:
    """Whether the build found nvcc."""
    return all(f"build {name}:" in (BUILD / "build.ninja").read_text() for name in PTX)


def build(ptx: Iterable[str]) -> None:
    """Compile the libraries for this process, and those of these PTX devices, if a source is newer."""
    if not (BUILD / "build.ninja").exists():
        sys.exit("the emulated kernels need the build folder that `pip install -e .` leaves")
    targets = [TARGET, *(ptx if has_ptx() else ())]
    command = [sys.executable, "-m", "ninja", "-C", str(BUILD), *targets]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment.setdefault("NINJA_STATUS", "[emulated kernels: %f of %t, %es] ")
    environment["PYTHON"] = sys.executable
    if subprocess.run(command, env=environment).returncode != 0:
        sys.exit(f"{' '.join(command)} failed")


@cache
def library() -> ctypes.CDLL:
    """The emulator and the ops on it, without PTX."""
    path = BUILD / f"lib{TARGET}.so"
    torch.ops.load_library(path)
    return ctypes.CDLL(str(path))


def take_launched() -> set[int]:
    """The addresses of the host's kernels that were launched since the last call."""
    kernels = (ctypes.c_void_p * 1024)()
    count = library().specdec_take_launched(kernels, ctypes.c_size_t(len(kernels)))
    assert count <= len(kernels)
    return {address for address in kernels[:count] if address is not None}


def num_bulk_copies() -> int:
    """The number of ``bulk_copy`` of all launches so far."""
    count = library().specdec_num_bulk_copies
    count.restype = ctypes.c_int64
    return int(count())


class Substitute(ctypes.Structure):
    """A kernel of the host and the entry that runs in its place (csrc/testing/emulation/ptx)."""

    _fields_ = [("kernel", ctypes.c_void_p), ("entry", ctypes.c_void_p)]


def kernel_names(path: Path) -> list[str]:
    """The kernels of which a library has PTX."""
    return [name.removeprefix("ptx_") for name in _symbols(path, "ptx_")]


@cache
def kernels(path: Path) -> dict[str, int]:
    """The addresses of the host's kernels of which a library has PTX: the two have the same name."""
    symbols = _symbols(BUILD / f"lib{TARGET}.so", "")
    missing = [name for name in kernel_names(path) if name not in symbols]
    assert not missing, f"{path} has kernels that the emulated library lacks: {missing}"
    known = "specdec_set_substitutes"
    base = ctypes.cast(getattr(library(), known), ctypes.c_void_p).value - symbols[known]
    return {name: base + symbols[name] for name in kernel_names(path)}


@cache
def substitutes(path: Path) -> dict[int, int]:
    """The entries of a PTX library, by the address of the host's kernel."""
    entries = ctypes.CDLL(str(path))
    return {kernel: entry_address(entries, f"ptx_{name}") for name, kernel in kernels(path).items()}


def entry_address(entries: ctypes.CDLL, name: str) -> int:
    """The address of the record of an entry, ``ptx_<kernel>``."""
    return ctypes.addressof(ctypes.c_char.in_dll(entries, name))


@contextlib.contextmanager
def approximation_error(units: int) -> Iterator[None]:
    """Every result of ex2.approx and lg2.approx is wrong by ``units`` units in the last place."""
    library().specdec_set_approximation_error(units)
    try:
        yield
    finally:
        library().specdec_set_approximation_error(0)


@contextlib.contextmanager
def tensor_core(name: str) -> Iterator[None]:
    """Launches without an op add as this tensor core does, one of TENSOR_CORES."""
    library().specdec_set_tensor_core(TENSOR_CORES.index(name))
    try:
        yield
    finally:
        library().specdec_set_tensor_core(0)


def _symbols(path: Path, prefix: str) -> dict[str, int]:
    """The offsets of the symbols of a library that begin with ``prefix``."""
    lines = subprocess.check_output(["nm", "--defined-only", str(path)], text=True).splitlines()
    symbols = (line.split() for line in lines)
    return {name: int(offset, 16) for offset, _, name in symbols if name.startswith(prefix)}


class EmulatedOps:
    """Replaces ``torch.ops.specdec``.

    Args:
        entries: libraries of PTX that runs in place of the host's kernels; later ones take precedence.
        tensor_core: how tensor cores add, one of TENSOR_CORES.
    """

    def __init__(self, *entries: Path, tensor_core: str = "exact") -> None:
        self._entries, self._tensor_core = entries, tensor_core

    @cached_property
    def _substitutes(self) -> ctypes.Array[Substitute]:
        chosen = {
            kernel: entry for path in self._entries for kernel, entry in substitutes(path).items()
        }
        return (Substitute * len(chosen))(*chosen.items())

    @contextlib.contextmanager
    def launches(self) -> Iterator[None]:
        """Launches run the PTX of this device, on its tensor cores."""
        chosen = self._substitutes
        library().specdec_set_substitutes(chosen, ctypes.c_size_t(len(chosen)))
        try:
            with tensor_core(self._tensor_core):
                yield
        finally:
            library().specdec_set_substitutes(None, ctypes.c_size_t(0))

    def __getattr__(self, name: str) -> Any:
        emulator = library()
        op = getattr(torch.ops.specdec_emulated, name)

        def run(*arguments: Any) -> Any:
            outcomes = []
            for order in range(len(THREAD_ORDERS)):
                emulator.specdec_set_thread_order(order)
                copies = [_copied(argument) for argument in arguments]
                with self.launches():
                    result = op(*copies)
                outcomes.append((_tensors(result), _tensors(copies), result))
            for order, (results, copies, _) in zip(THREAD_ORDERS, outcomes, strict=True):
                for ours, theirs in zip(
                    results + copies, outcomes[0][0] + outcomes[0][1], strict=True
                ):
                    assert _bits_equal(ours, theirs), f"{name} differs in thread order {order}"
            for original, written in zip(_tensors(arguments), outcomes[0][1], strict=True):
                if not _bits_equal(original, written):
                    original.copy_(written)
            return outcomes[0][2]

        return run


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _copied(argument: Any) -> Any:
    """A copy with the same strides, in memory of exactly their span, so that reads beyond it are detected."""
    if isinstance(argument, (list, tuple)):
        return [_copied(item) for item in argument]
    if not isinstance(argument, Tensor):
        return argument
    span = sum(
        (size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True)
    )
    storage = torch.as_strided(argument, (span + 1 if argument.numel() else 0,), (1,)).clone()
    return storage.as_strided(argument.shape, argument.stride(), 0)


def _bits_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Bitwise equality: NaN equals itself, and -0 differs from 0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    return torch.equal(ours.contiguous().view(integer), theirs.contiguous().view(integer))


OPS = {"emulated": EmulatedOps()} | {name: EmulatedOps(BUILD / f"lib{name}.so") for name in PTX}


def use(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the ops run on a device of the tests; returns the device of their tensors."""
    if device not in OPS:
        return device
    if device in PTX and not has_ptx():
        pytest.skip(f"the device {device} needs nvcc, which the build has not found")
    monkeypatch.setattr(_library, "native", OPS[device])
    monkeypatch.setattr(packed_head, "reads_panels", lambda _: False)
    return "cpu"
