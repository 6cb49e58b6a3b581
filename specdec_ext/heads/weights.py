"""What draft heads of all kinds are: a config, and exactly the tensors that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="DraftWeights")


class WeightsConfig(Protocol):
    """What a head computes; ``vocab_size`` is the target's."""

    @property
    def vocab_size(self) -> int: ...

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, and no other."""


class UnkeptTensors(Mapping[str, Tensor]):
    """Tensors that are read whenever they are asked for, and not kept.

    Args:
        names: of all.
        read: the tensor of a name.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]):
        self._names, self._read = tuple(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class DraftWeights:
    """Base class of ``DraftHead`` and ``MedusaHeads``.

    Attributes:
        config: what they compute.
        tensors: exactly those of ``config.tensor_shapes()``; ``draft_to_target`` is int64 and holds the
            target's id of each draft id, the others have one floating-point dtype.
        source: where they were read from, for messages.

    Raises:
        ValueError: for tensors that are missing, too many, of another shape, or ids outside the vocabulary.
    """

    config: WeightsConfig
    tensors: Mapping[str, Tensor]
    source: str = "weights made in memory"

    def __post_init__(self) -> None:
        expected = self.config.tensor_shapes()
        missing = sorted(expected.keys() - self.tensors.keys())
        surplus = sorted(self.tensors.keys() - expected.keys())
        if missing or surplus:
            raise ValueError(
                f"{self.source}: missing tensors {missing or 'none'}, surplus tensors {surplus or 'none'}"
            )
        for name, shape in expected.items():
            found = tuple(self.tensors[name].shape)
            if found != shape:
                raise ValueError(f"{self.source}: {name} is {found}; expected {shape}")
        targets = self.tensors.get("draft_to_target")
        if targets is None or targets.is_meta:
            return
        lowest, highest = (int(bound) for bound in targets.aminmax())
        if lowest < 0 or highest >= self.config.vocab_size:
            raise ValueError(
                f"{self.source}: draft_to_target holds ids from {lowest} to {highest}; expected ids in "
                f"[0, {self.config.vocab_size}) (files may hold offsets, here they are ids)"
            )

    def to(self: Self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """The same on a device, floating-point tensors in ``dtype``; tensors that are not kept stay so."""
        if isinstance(self.tensors, UnkeptTensors):
            own = self.tensors
            return replace(
                self, tensors=UnkeptTensors(own, lambda name: _moved(own[name], device, dtype))
            )
        tensors = {name: _moved(tensor, device, dtype) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)


def _moved(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)
