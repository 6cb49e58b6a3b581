"""Devices, random draft trees, strided tensors and comparisons for the tests of ops."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from specdec_ext import ops

# Devices of torch; the fixture `device` adds those of emulation.py.
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def to(device: str, arguments: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(argument.to(device) for argument in arguments)


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    """Ops use two threads, where tests use one."""
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def strided(tensor: Tensor, device: str, between: float) -> Tensor:
    """The same values, with two values ``between`` after each."""
    wide = tensor.to(device).unsqueeze(-1).repeat(*[1] * tensor.ndim, 3)
    wide[..., 1:] = between
    return wide[..., 0]


def sliced(tensor: Tensor, device: str) -> Tensor:
    """The same values of shape [5, 6, 101], at an odd offset in a buffer of NaN."""
    buffer = torch.full((6, 7, 3, 205), torch.nan, dtype=tensor.dtype, device=device)
    view = buffer[1:, :6, 1, 7:108]
    view.copy_(tensor)
    return view


def has_matrix_units() -> bool:
    """Whether ops multiply bfloat16 on matrix units, or emulate them.

    The first call chooses the instructions for the life of the process, so modules don't call it when they
    are imported.
    """
    return ops.cpu_instructions().startswith("amx")


def before_a_closed_page(tensor: Tensor) -> Tensor:
    """The same values on the CPU, behind which there is a page of memory that can't be read."""
    count = tensor.numel() * tensor.element_size()
    size = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = torch.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), dtype=torch.uint8)
    moved = pages[size - count : size].view(tensor.dtype).view(tensor.shape)
    moved.copy_(tensor)
    closed = ctypes.c_void_p(pages.data_ptr() + size), ctypes.c_size_t(mmap.PAGESIZE)
    assert ctypes.CDLL(None, use_errno=True).mprotect(*closed, 0) == 0
    return moved


def returns(call: Callable[[], object]) -> bool:
    """Whether a call does not end its process, which is a copy of this one."""
    if not hasattr(os, "fork"):
        pytest.skip("a wrong read would end the process of the tests")
    child = os.fork()
    if not child:
        call()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def check_rows_alone(
    op: Callable[..., Iterable[Tensor]], arguments: tuple[Tensor, ...], names: list[str]
) -> None:
    """Check that each row of a batch has the same result without the other rows."""
    together = tuple(op(*arguments))
    for row in range(len(arguments[0])):
        alone = op(*(argument[row : row + 1] for argument in arguments))
        assert_same(alone, tuple(part[row : row + 1] for part in together), names)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_parents(batch: int, nodes: int, seed: int, *, illegal: float = 0.0) -> Tensor:
    """Random trees; a share ``illegal`` of the links is inactive, forward, to itself or out of range."""
    rng = generator(seed)
    order = torch.arange(nodes)
    parents = (torch.rand(batch, nodes, generator=rng) * order).long()
    parents[:, 0] = -1
    wrong = torch.rand(batch, nodes, generator=rng) < illegal
    choices = torch.stack([torch.full((nodes,), -2), order, order + 1, torch.full((nodes,), -9)])
    kinds = torch.randint(len(choices), (batch, nodes), generator=rng)
    return torch.where(wrong, choices[kinds, order], parents)


def all_parents(nodes: int) -> Tensor:
    """Every row of parents with entries in {-2, 0 .. i - 1} (and -2, -1 for node 0)."""
    choices = [torch.tensor([-2, *range(node)] if node else [-2, -1]) for node in range(nodes)]
    return torch.cartesian_prod(*choices).view(-1, nodes)


def assert_same(actual: Iterable[Tensor], expected: Iterable[Tensor], names: list[str]) -> None:
    """Bitwise equality of op outputs, naming the output that differs."""
    actual, expected = tuple(actual), tuple(expected)
    assert len(actual) == len(expected) == len(names)
    for name, ours, theirs in zip(names, actual, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
        assert torch.equal(ours.cpu(), theirs.cpu()), f"{name}:\n{ours}\nexpected\n{theirs}"
