"""Tensor-parallel models: which weights are distributed, and decisions that all processes make alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel


def agreed_seed(model: PreTrainedModel, seed: int) -> int:
    """Return rank 0's seed on tensor-parallel models, else ``seed``.

    Every process samples the tokens itself. With different seeds the processes would sample different texts
    and soon deadlock.
    """
    agree = _agreement(model)
    return seed if agree is None else int(agree(torch.tensor(seed, device="cpu")))


def agreed_clock(model: PreTrainedModel, clock: Callable[[], float]) -> Callable[[], float]:
    """Return rank 0's clock on tensor-parallel models, else ``clock``.

    Decisions that depend on measured times are then the same in all processes.
    """
    agree = _agreement(model)
    if agree is None:
        return clock
    return lambda: float(agree(torch.tensor(clock(), dtype=torch.float64, device="cpu")))


def is_tensor_parallel(weight: Any) -> bool:
    """Whether this weight is distributed over several processes."""
    if not _is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _agreement(model: PreTrainedModel) -> Callable[[Tensor], Tensor] | None:
    """Return a function that broadcasts rank 0's value to all processes of a tensor-parallel model; None for
    other models."""
    if not _is_distributed():
        return None  # without a look at every parameter, which takes time in each call
    parts: Any = filter(is_tensor_parallel, model.parameters())
    mesh = next((each.device_mesh for each in parts), None)
    if mesh is None:
        return None
    group = mesh.get_group("tp" if mesh.ndim > 1 else None)

    def agree(value: Tensor) -> Tensor:
        value = value.to(mesh.device_type)
        distributed.broadcast(value, group=group, group_src=0)
        return value

    return agree
