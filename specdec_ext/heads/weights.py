"""``DraftWeights``: the base class of all draft heads, a config with exactly the tensors that it requires."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import tracked
from specdec_ext.display.text import byte_size
from specdec_ext.heads.record import HeadRecord

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


@dataclass(frozen=True, repr=False)
class DraftWeights(Summarised):
    """Base class of ``DraftHead`` and ``MedusaHeads``.

    Attributes:
        config: determines the computation.
        tensors: exactly the tensors of ``config.tensor_shapes()``. ``draft_to_target`` is int64 and holds the
            target's id of each draft id; all other tensors have one floating-point dtype.
        source: where the tensors come from, for messages.
        record: facts from the checkpoint that do not affect the computation.

    Raises:
        ValueError: for missing or unexpected tensors, wrong shapes, or ids outside the vocabulary.
    """

    config: WeightsConfig
    tensors: Mapping[str, Tensor]
    source: str = "weights made in memory"
    record: HeadRecord = field(default_factory=HeadRecord)

    def __post_init__(self) -> None:
        expected = self.config.tensor_shapes()
        missing = sorted(expected.keys() - self.tensors.keys())
        surplus = sorted(self.tensors.keys() - expected.keys())
        if missing or surplus:
            raise ValueError(
                f"{self.source} does not have exactly the tensors of its config: missing tensors "
                f"{missing or 'none'}, unexpected tensors {surplus or 'none'}"
            )
        read_now = isinstance(self.tensors, UnkeptTensors)
        with tracked(f"reading {self.source}", len(expected), "tensor", shown=read_now) as work:
            for name, shape in expected.items():
                found = tuple(self.tensors[name].shape)
                if found != shape:
                    raise ValueError(
                        f"{self.source}: {name} has shape {found}; its config requires {shape}"
                    )
                work.advance()
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

    @property
    def _kind(self) -> str:
        """What this is, such as ``"EAGLE-3 head"``."""
        raise NotImplementedError

    def _facts(self) -> Iterable[tuple[str, str]]:
        """Name and value of what only this kind of head has."""
        raise NotImplementedError

    @property
    def _dtype(self) -> torch.dtype:
        """The floating-point dtype of the tensors."""
        return self.tensors[min(self._shapes, key=lambda name: prod(self._shapes[name]))].dtype

    @property
    def _num_parameters(self) -> int:
        """Number of elements of the floating-point tensors; a shared tensor counts once."""
        if isinstance(self.tensors, UnkeptTensors):
            # None of them are shared, and reading them may take long.
            return sum(map(prod, self._shapes.values()))
        tensors = [self.tensors[name] for name in self._shapes]
        distinct = {tensor.data_ptr() or id(tensor): tensor.numel() for tensor in tensors}
        return sum(distinct.values())

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the floating-point tensors."""
        shapes = self.config.tensor_shapes()
        return {name: shape for name, shape in shapes.items() if name != "draft_to_target"}

    def summary(self) -> str:
        made_for = self.record.target_name
        return f"{self._kind} of {self._num_parameters:,} parameters, {self._size()}" + (
            f", made for {made_for}" if made_for else ""
        )

    def sentences(self) -> Iterable[str]:
        yield f"{self._kind} of {self._num_parameters:,} parameters, read from {self.source}."
        if self.record.made_for is None:
            yield "The checkpoint does not record the model that it drafts for."
        for name in self.record.ambiguous:
            yield (
                f"The checkpoint is ambiguous about {name}: specdec inspect --target MODEL --calibrate FILE "
                "finds the right value."
            )
        yield (
            "generate(model, drafter=...) drafts with it and emits the same text as without it. specdec "
            "inspect --target MODEL tells whether it fits a model."
        )

    def tables(self) -> Iterable[Table]:
        rows = [
            ("parameters", f"{self._num_parameters:,}"),
            ("weights", self._size()),
            ("format", self.record.format),
            *self._facts(),
            ("made for", self.record.made_for or "not recorded"),
        ]
        if self.record.ignored:
            rows.append(("unused tensors", ", ".join(self.record.ignored)))
        if self.record.ambiguous:
            rows.append(("ambiguous", f"{', '.join(self.record.ambiguous)}; --calibrate decides"))
        yield Table(rows, title=self.source)

    def _size(self) -> str:
        size = byte_size(self._num_parameters * self._dtype.itemsize)
        return f"{size} ({str(self._dtype).removeprefix('torch.')})"

    def to(self: Self, device: torch.device | str, dtype: torch.dtype, keep: bool = True) -> Self:
        """Return a copy on ``device`` with floating-point tensors in ``dtype``.

        ``UnkeptTensors``, and any tensors with ``keep=False``, are converted each time they are read.
        """
        own = self.tensors
        if isinstance(own, UnkeptTensors) or not keep:
            return replace(
                self, tensors=UnkeptTensors(own, lambda name: _moved(own[name], device, dtype))
            )
        tensors = {name: _moved(tensor, device, dtype) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)


def _moved(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)
