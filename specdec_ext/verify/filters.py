"""Transformers' temperature, top-k, top-p and min-p warpers, computed by one op over all rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from specdec_ext import ops
from specdec_ext.models.base import RowRule

# The warpers in the order in which the op applies them -> the name of the parameter, both an attribute of the
# warper and an argument of the op, and the value that turns it off.
STAGES: dict[type, tuple[str, float]] = {
    warper: (name, RowRule._field_defaults[name])
    for warper, name in (
        (hf.TemperatureLogitsWarper, "temperature"),
        (hf.TopKLogitsWarper, "top_k"),
        (hf.TopPLogitsWarper, "top_p"),
        (hf.MinPLogitsWarper, "min_p"),
    )
}
DTYPES = {"top_k": torch.int64}  # the others are float32
_ORDER = list(STAGES)


class SampleFilter(LogitsProcessor):
    """A sequence of warpers, computed by ``ops.sample_filter``. Scores may also be 16-bit logits.

    Attributes:
        values: the arguments of the op for every row.
    """

    def __init__(self, warpers: Iterable[Any], device: torch.device):
        self.values = dict(STAGES.values())
        for warper in warpers:
            name, _ = STAGES[type(warper)]
            self.values[name] = getattr(warper, name)
        self._parameters = [
            torch.tensor([value], dtype=DTYPES.get(name, torch.float32), device=device)
            for name, value in self.values.items()
        ]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = len(scores)
        return ops.sample_filter(scores, *(value.expand(rows) for value in self._parameters))


def filter_arguments(rows: Sequence[Sequence[float]], device: torch.device) -> list[Tensor]:
    """The last arguments of ``ops.sample_filter`` for rows with these values; [] if no row has a filter.

    Args:
        rows: for each row, the values of all stages in their order.
    """
    off = tuple(value for _, value in STAGES.values())
    if all(tuple(values) == off for values in rows):
        return []
    names = (name for name, _ in STAGES.values())
    return [
        torch.tensor(values, dtype=DTYPES.get(name, torch.float32), device=device)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    ]


def fuse_filters(processors: Iterable[Any], device: torch.device) -> LogitsProcessorList:
    """Replace each sequence of warpers that follows the op's order by one :class:`SampleFilter`."""
    fused: list[Any] = []
    run: list[Any] = []
    for processor in processors:
        if run and not (_is_stage(processor) and _stage(run[-1]) < _stage(processor)):
            fused.append(SampleFilter(run, device))
            run = []
        (run if _is_stage(processor) else fused).append(processor)
    return LogitsProcessorList(fused + ([SampleFilter(run, device)] if run else []))


def _is_stage(processor: Any) -> bool:
    """Whether the op computes exactly what this processor does. Subclasses may do anything."""
    return (
        type(processor) in STAGES
        and getattr(processor, "filter_value", -torch.inf) == -torch.inf
        and getattr(processor, "min_tokens_to_keep", 1) == 1
    )


def _stage(warper: Any) -> int:
    return _ORDER.index(type(warper))
