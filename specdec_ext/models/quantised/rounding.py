"""``rounded``: the codes and scales that approximate a matrix with little error.

With symmetric codes, the element of largest magnitude in a group becomes the lowest code, -8 or -128, with
the scale's sign, so that all codes are in use (the format q4_0 of llama.cpp). A smaller scale represents the
many small elements better and cuts off the largest one. So a few scales around it are tried, and the one with
the least squared error is fitted once more to its codes by least squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_ext.ops.quantise import QuantisedWeight

# Elements of a matrix that are searched at a time, so that they stay in the cache.
_AT_ONCE = 1 << 18

# Scales that are tried, relative to the one described above; 1 and the scale with which the codes reach the
# largest element in both directions, 128 / 127 or 8 / 7, are among them. With 8 bits nothing else helps.
_FACTORS = {8: (128 / 127, 1.0), 4: (8 / 7, 1.07, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)}
# The same for codes with an offset, relative to the scale with which they span all elements.
_SPANS = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8)}


@dataclass(frozen=True)
class Rounded:
    """A quantised matrix and its error.

    Attributes:
        weight: the codes and scales.
        error: root of the mean squared error, relative to the root mean square of the matrix.
    """

    weight: QuantisedWeight
    error: float


def rounded(
    matrix: Tensor, bits: int, group_size: int | None = None, symmetric: bool = True
) -> Rounded:
    """Quantise a matrix. The result is the same in every run, and the memory beside it is bounded.

    Scales of groups are bfloat16, as the matrices of most models are; codes are chosen for the scale as it is
    stored, so its rounding costs almost nothing. Scales of whole rows are float32, and so are scales with
    offsets.

    Args:
        matrix: ``[outs, ins]``, finite floating-point numbers, on the CPU.
        bits: 8 or 4.
        group_size: number of inputs that share a scale, None for all.
        symmetric: whether zero is a code. Otherwise every group has an offset as well.
    """
    outs, ins = matrix.shape
    size = min(group_size or ins, ins)
    whole = ins - ins % size
    stored = scales_dtype(ins, group_size, symmetric)
    codes = torch.empty(outs, ins, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(outs, -(-ins // size), dtype=torch.float32, device=matrix.device)
    offsets = None if symmetric else torch.empty_like(scales)
    squared_error = squares = 0.0
    step = max(1, _AT_ONCE // ins)
    for first in range(0, outs, step):
        rows = slice(first, first + step)
        part = matrix[rows].float()
        squares += float(part.square().sum())
        # The last group may be smaller than the others.
        for columns, groups in (
            (slice(0, whole), slice(0, ins // size)),
            (slice(whole, ins), slice(-1, None)),
        ):
            elements = part[:, columns]
            if not elements.numel():
                continue
            grouped = elements.reshape(len(part), -1, min(size, elements.shape[1]))
            fit = (
                _symmetric(grouped, bits, stored)
                if offsets is None
                else _with_offsets(grouped, bits)
            )
            codes[rows, columns] = fit.codes(grouped).flatten(1).to(torch.int8)
            scales[rows, groups] = fit.scales.squeeze(-1)
            if offsets is not None:
                offsets[rows, groups] = fit.offsets.squeeze(-1)
            squared_error += float(fit.errors.sum())
    if bits == 4:
        codes += 8
        offsets = None if offsets is None else offsets - 8 * scales
    weight = QuantisedWeight.pack(codes, scales.to(stored), offsets, bits=bits)
    return Rounded(weight, (squared_error / squares) ** 0.5 if squares else 0.0)


def scales_dtype(ins: int, group_size: int | None, symmetric: bool) -> torch.dtype:
    """The dtype in which :func:`rounded` stores the scales of a matrix with this number of inputs."""
    has_groups = group_size is not None and group_size < ins
    return torch.bfloat16 if symmetric and has_groups else torch.float32


class _Fit:
    """Scales and offsets of groups, and the squared errors of the codes that belong to them.

    Args:
        scales, offsets: ``[rows, groups, 1]`` float32.
        groups: ``[rows, groups, size]`` float32, the elements.
        bits: 8 or 4. Codes are signed here: -8 to 7 or -128 to 127.
    """

    def __init__(self, scales: Tensor, offsets: Tensor, groups: Tensor, bits: int):
        self.scales, self.offsets, self.bits = scales.where(scales != 0, 1), offsets, bits
        approximate = self.codes(groups) * self.scales + self.offsets
        self.errors = (approximate - groups).square().sum(-1, keepdim=True)

    def codes(self, groups: Tensor) -> Tensor:
        half = 1 << self.bits - 1
        return ((groups - self.offsets) / self.scales).round().clamp(-half, half - 1)

    def better_of(self, other: _Fit) -> _Fit:
        """Take the scales of ``other`` for the groups in which its error is smaller."""
        smaller = other.errors < self.errors
        self.scales = other.scales.where(smaller, self.scales)
        self.offsets = other.offsets.where(smaller, self.offsets)
        self.errors = other.errors.where(smaller, self.errors)
        return self


def _symmetric(groups: Tensor, bits: int, stored: torch.dtype) -> _Fit:
    """Fit scales of dtype ``stored``."""
    zero = groups.new_zeros(())
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    full = extreme / -(1 << bits - 1)

    def fit(scales: Tensor) -> _Fit:
        return _Fit(scales.to(stored).float(), zero, groups, bits)

    first, *others = _FACTORS[bits]
    best = fit(full * first)
    for factor in others:
        best = best.better_of(fit(full * factor))
    codes = best.codes(groups)
    refined = (codes * groups).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True)
    return best.better_of(fit(refined.nan_to_num(0.0)))


def _with_offsets(groups: Tensor, bits: int) -> _Fit:
    """Fit scales and offsets."""
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    middle = (lowest + highest) / 2
    full = (highest - lowest) / ((1 << bits) - 1)
    first, *others = (
        # The middle of the codes is -1/2.
        _Fit(full * factor, middle + full * factor / 2, groups, bits)
        for factor in _SPANS[bits]
    )
    best = first
    for other in others:
        best = best.better_of(other)
    codes = best.codes(groups)
    centred = codes - codes.mean(-1, keepdim=True)
    slope = (centred * groups).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True)
    slope = slope.nan_to_num(0.0)
    offset = groups.mean(-1, keepdim=True) - slope * codes.mean(-1, keepdim=True)
    return best.better_of(_Fit(slope, offset, groups, bits))
