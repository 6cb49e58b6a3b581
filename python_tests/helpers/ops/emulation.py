"""The device "emulated": the CUDA kernels of every op, compiled for the host (csrc/testing/emulation).

An op runs in three thread orders (forward, backward and shuffled) on copies of its arguments. The results
must have the same bits: without a necessary barrier, one of the orders gives another result. With
the runtime of AddressSanitizer and UBSan loaded, as in ``make test``, the library with sanitizers is used.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import cached_property
from typing import Any

import torch
from helpers.places import ROOT
from torch import Tensor

THREAD_ORDERS = ("forward", "backward", "shuffled")
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
TARGET = "emulated-sanitized" if SANITIZED else "emulated"
BUILD = ROOT / "build" / "native"


def build() -> None:
    """Compile the library for this process if a source is newer."""
    if not (BUILD / "build.ninja").exists():
        sys.exit("the emulated kernels need the build folder that `pip install -e .` leaves")
    command = [sys.executable, "-m", "ninja", "-C", str(BUILD), TARGET]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


class EmulatedOps:
    """Replaces ``torch.ops.specdec``."""

    @cached_property
    def _library(self) -> ctypes.CDLL:
        path = BUILD / f"lib{TARGET}.so"
        torch.ops.load_library(path)
        return ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Any:
        library = self._library
        op = getattr(torch.ops.specdec_emulated, name)

        def run(*arguments: Any) -> Any:
            outcomes = []
            for order in range(len(THREAD_ORDERS)):
                library.specdec_set_thread_order(order)
                copies = [_copied(argument) for argument in arguments]
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


emulated_ops = EmulatedOps()
