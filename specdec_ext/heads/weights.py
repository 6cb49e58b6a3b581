"""``DraftWeights``: the base class of all draft heads, a config with exactly the tensors that it requires."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="DraftWeights")


class WeightsConfig(Protocol):
    """The config of a head of any kind; ``vocab_size`` is the target's."""

    @property
    def vocab_size(self) -> int: ...

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of the head."""


class UnkeptTensors(Mapping[str, Tensor]):
    """A mapping that reads a tensor each time it is accessed, instead of keeping it in memory.

    Args:
        names: the names of all tensors.
        read: reads the tensor of a name.
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
        config: determines the computation.
        tensors: exactly the tensors of ``config.tensor_shapes()``. ``draft_to_target`` is int64 and holds the
            target's id of each draft id; all other tensors have one floating-point dtype.
        source: where the tensors come from, for messages.

    Raises:
        ValueError: for missing or unexpected tensors, wrong shapes, or ids outside the vocabulary.
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
                f"{self.source} does not have exactly the tensors of its config: missing tensors "
                f"{missing or 'none'}, unexpected tensors {surplus or 'none'}"
            )
        for name, shape in expected.items():
            found = tuple(self.tensors[name].shape)
            if found != shape:
                raise ValueError(
                    f"{self.source}: {name} has shape {found}; its config requires {shape}"
                )
        targets = self.tensors.get("draft_to_target")
        if targets is None or targets.is_meta:
            return
        lowest, highest = (int(bound) for bound in targets.aminmax())
        if lowest < 0 or highest >= self.config.vocab_size:
            raise ValueError(
                f"{self.source}: draft_to_target holds ids from {lowest} to {highest}; expected ids of the "
                f"target in [0, {self.config.vocab_size}). The d2t of checkpoints holds offsets: add each "
                "draft id to its offset"
            )

    def to(self: Self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Return a copy on ``device`` with floating-point tensors in ``dtype``.

        ``UnkeptTensors`` are converted each time they are read.
        """
        if isinstance(self.tensors, UnkeptTensors):
            own = self.tensors
            return replace(
                self, tensors=UnkeptTensors(own, lambda name: _moved(own[name], device, dtype))
            )
        tensors = {name: _moved(tensor, device, dtype) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)


def _moved(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)
