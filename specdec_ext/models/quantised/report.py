"""``QuantisationReport``: how large the quantised layers of a model are, and how exact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdec_ext.display import Summarised, Table
from specdec_ext.display.text import byte_size, counted
from specdec_ext.models.quantised.linear import QuantisedLinear, describe_scales


@dataclass(frozen=True)
class QuantisedLayer:
    """Size and error of one layer.

    Attributes:
        name: name of the module.
        numbers: number of weights.
        nbytes: bytes of codes and scales.
        layout: bits, groups and scales, in words.
        error: root of the mean squared error of the weights, relative to the root of their mean square; None
            if the model was loaded quantised.
    """

    name: str
    numbers: int
    nbytes: int
    layout: str
    error: float | None


@dataclass(frozen=True, repr=False)
class QuantisationReport(Summarised):
    """Sizes and errors of a model that ``quantize`` has changed.

    Attributes:
        layers: the quantised layers.
        other_bytes: bytes of all other parameters and buffers: embeddings, norms, skipped layers.
        dtype: dtype of the model, which the weights of the layers would have otherwise.
    """

    layers: tuple[QuantisedLayer, ...]
    other_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel) -> QuantisationReport:
        """Look at a model.

        Raises:
            ValueError: if it has no quantised layers.
        """
        found = tuple(
            _layer(name, module)
            for name, module in model.named_modules()
            if isinstance(module, QuantisedLinear)
        )
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no quantised layers; call specdec_ext.quantize(model) first"
            )
        nbytes = sum(each.nbytes for each in found)
        return cls(found, round(model.get_memory_footprint()) - nbytes, model.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales of all layers."""
        return sum(each.nbytes for each in self.layers)

    @property
    def nbytes_before(self) -> int:
        """Bytes of the same weights in ``dtype``."""
        return sum(each.numbers for each in self.layers) * self.dtype.itemsize

    @property
    def bits_per_weight(self) -> float:
        """Scales and offsets included."""
        return 8 * self.nbytes / sum(each.numbers for each in self.layers)

    @property
    def error(self) -> float | None:
        """The mean error of the layers; None if that of a layer is not known."""
        errors = [each.error for each in self.layers if each.error is not None]
        return sum(errors) / len(errors) if len(errors) == len(self.layers) else None

    def summary(self) -> str:
        error = "" if self.error is None else f"; mean error of a layer {self.error:.2%}"
        return (
            f"{counted(len(self.layers), 'layer')} of {self.bits_per_weight:.2f} bits per weight: "
            f"{byte_size(self.nbytes)} instead of {byte_size(self.nbytes_before)} in {_name(self.dtype)}"
            f"{error}"
        )

    def sentences(self) -> Iterable[str]:
        yield f"{self.summary()}."
        yield (
            f"The embedding, norms and layers that were left out take {byte_size(self.other_bytes)}. The "
            "error is the root mean square of the differences between the weights before and after, relative "
            "to that of the weights."
        )

    def tables(self) -> Iterable[Table]:
        """A row for all layers of a kind: those with the same last name and the same layout."""
        kinds: dict[tuple[str, str], list[QuantisedLayer]] = {}
        for each in self.layers:
            kinds.setdefault((each.name.rpartition(".")[2], each.layout), []).append(each)
        yield Table(
            [
                (
                    name,
                    str(len(layers)),
                    layout,
                    byte_size(sum(x.nbytes for x in layers)),
                    _range(layers),
                )
                for (name, layout), layers in kinds.items()
            ],
            ("layers", "number", "bits, groups, scales", "size", "error"),
        )


def _layer(name: str, module: QuantisedLinear) -> QuantisedLayer:
    weight = module.weight
    outs, ins = weight.shape
    groups = "rows" if weight.group_size == ins else f"groups of {weight.group_size}"
    layout = f"{weight.bits}, {groups}, {describe_scales(weight)}"
    return QuantisedLayer(name, outs * ins, weight.nbytes, layout, module.error)


def _range(layers: list[QuantisedLayer]) -> str:
    errors = [each.error for each in layers if each.error is not None]
    if len(errors) < len(layers):
        return ""
    low, high = (f"{each(errors):.2%}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
