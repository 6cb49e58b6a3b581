"""Shared by the op tests: random draft trees, devices, comparison with the reference."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Devices of torch; the fixture `device` adds "emulated".
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


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
