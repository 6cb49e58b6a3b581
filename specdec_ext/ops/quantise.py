"""Weights of 8 and 4 bits: small whole numbers, the codes, and a scale for each output or group of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

_FORMATS = {"same": None, "int8": torch.int8, "float8": torch.float8_e4m3fn}
_AT_ONCE = 1 << 24  # elements of a matrix that are converted to float32 at a time

# Codes of 4 bits are packed in blocks of 32 inputs: byte l has input l in its low half, 16 + l in its high.
CODE_BLOCK = 32


@dataclass(frozen=True)
class QuantisedWeight:
    """A matrix ``[outs, ins]`` of codes, which ``ops.linear`` multiplies without expanding all of it.

    The weight of a code is ``code * scale + offset``, rounded once to float32. Codes of 8 bits are signed.
    Codes of 4 bits, 0 to 15, may stand for ``levels`` instead of themselves; otherwise, without offsets, they
    are 8 too large: ``(code - 8) * scale``.

    Attributes:
        codes: int8 ``[outs, ins]`` with a contiguous last dimension, or uint8 ``[outs, 16 * ceil(ins / 32)]``
            contiguous, as :meth:`pack` packs codes of 4 bits.
        scales: ``[outs, groups]`` float32 or bfloat16, or float32 ``[outs, groups, 2]`` with pairs of a scale
            and an offset; contiguous. There is one group for all inputs, or groups of 32, 64, 128, ...
            inputs, of which the last may be smaller.
        ins: number of inputs.
        levels: ``[16]`` float32 numbers that codes of 4 bits stand for, None for 0 to 15.
    """

    codes: Tensor
    scales: Tensor
    ins: int
    levels: Tensor | None = None

    def __post_init__(self) -> None:
        kinds = {torch.int8: self.ins, torch.uint8: _packed_width(self.ins)}
        _check(
            "codes",
            self.codes,
            self.codes.dtype in kinds
            and self.codes.ndim == 2
            and self.codes.shape[1] == kinds[self.codes.dtype],
            f"int8 [outs, {self.ins}] or uint8 [outs, {_packed_width(self.ins)}]",
        )
        outs, dtype = len(self.codes), self.scales.dtype
        _check(
            "scales",
            self.scales,
            self.scales.shape[:1] == (outs,)
            and (
                (self.scales.ndim == 2 and dtype in (torch.float32, torch.bfloat16))
                or (self.scales.shape[2:] == (2,) and dtype == torch.float32)
            ),
            f"float32 or bfloat16 [{outs}, groups], or float32 [{outs}, groups, 2]",
        )
        _ = self.group_size
        if self.levels is not None:
            _check(
                "levels",
                self.levels,
                self.levels.dtype == torch.float32
                and self.levels.shape == (16,)
                and self.codes.dtype == torch.uint8,
                "float32 [16], for codes of 4 bits",
            )

    @classmethod
    def pack(
        cls,
        codes: Tensor,
        scales: Tensor,
        offsets: Tensor | None = None,
        *,
        bits: int,
        levels: Tensor | None = None,
    ) -> QuantisedWeight:
        """Make a weight of a code per element.

        Args:
            codes: ``[outs, ins]`` of any integer dtype; -128 to 127 for 8 bits, 0 to 15 for 4 bits.
            scales: ``[outs, groups]`` float32, bfloat16 or float16.
            offsets: like ``scales``; what is added to the products, None for nothing. A zero point ``z`` is
                an offset of ``-z * scale``, which is exact in float32 if the scale has 16 bits.
            bits: 8 or 4.
            levels: see :class:`QuantisedWeight`.

        Raises:
            ValueError: for codes out of range, and for shapes or dtypes that do not fit.
        """
        lowest, highest = {8: (-128, 127), 4: (0, 15)}.get(bits, (0, 0))
        if not highest:
            raise ValueError(f"bits={bits}; expected 8 or 4")
        if codes.ndim != 2 or codes.dtype.is_floating_point:
            raise ValueError(
                f"codes is {codes.dtype} of shape {[*codes.shape]}; expected integers [outs, ins]"
            )
        if codes.numel() and not lowest <= int(codes.min()) <= int(codes.max()) <= highest:
            raise ValueError(
                f"codes of {int(codes.min())} to {int(codes.max())}; expected {lowest} to {highest} for "
                f"{bits} bits"
            )
        ins = codes.shape[1]
        if offsets is not None:
            scales = torch.stack([scales.float(), offsets.float()], dim=-1)
        elif scales.dtype != torch.bfloat16:
            scales = scales.float()
        packed = codes.to(torch.int8) if bits == 8 else _pack_nibbles(codes)
        return cls(packed.contiguous(), scales.contiguous(), ins, levels)

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, int]:
        """``(outs, ins)``."""
        return len(self.codes), self.ins

    @cached_property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        groups = self.scales.shape[1]
        size = CODE_BLOCK
        while size < self.ins and -(-self.ins // size) > groups:
            size *= 2
        if groups == 1:
            return self.ins
        if -(-self.ins // size) != groups:
            raise ValueError(
                f"scales has {groups} groups for {self.ins} inputs; expected one, or groups of 32, 64, "
                "128, ... inputs"
            )
        return size

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights ``[outs, ins]`` of the codes."""
        numbers, scales, offsets = self.expand()
        weights = numbers * scales
        if offsets is not None:
            # The product is exact in float64, so the sum is rounded twice, to float64 and to float32.
            weights += offsets
        return weights.float().to(dtype)

    def expand(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what codes stand for, scales and offsets, float64 ``[outs, ins]``.

        A weight is ``number * scale + offset``; without offsets, the third is None.
        """
        codes = self.codes if self.bits == 8 else _unpack_nibbles(self.codes, self.ins)
        numbers = codes.double() if self.levels is None else self.levels.double()[codes.long()]
        if self.bits == 4 and self.levels is None and self.scales.ndim == 2:
            numbers -= 8
        group = torch.arange(self.ins, device=codes.device) // self.group_size
        expanded = self.scales.double()[:, group]
        if expanded.ndim == 2:
            return numbers, expanded, None
        return numbers, expanded[..., 0], expanded[..., 1]


def weight_dtype(weights: str) -> torch.dtype | None:
    """The dtype of a format, None for "same".

    Raises:
        ValueError: for an unknown format.
    """
    if weights not in _FORMATS:
        raise ValueError(f"weights={weights!r}; expected one of {', '.join(_FORMATS)}")
    return _FORMATS[weights]


def quantise(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit numbers ``[outs, ins]`` and float32 scales ``[outs]`` whose product approximates the matrix.

    If an output has a weight that is not finite, the product is not finite either.

    Args:
        matrix: ``[outs, ins]``, or a tensor without elements.
        dtype: torch.int8 or torch.float8_e4m3fn.
    """
    if matrix.numel() == 0:
        return matrix, matrix.new_empty(0, dtype=torch.float32)
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = matrix.abs().amax(dim=1).float() / largest
    scales = scales.where(scales != 0, 1)
    numbers = torch.empty_like(matrix, dtype=dtype)
    step = max(1, _AT_ONCE // matrix.shape[1])
    for first in range(0, len(matrix), step):
        rows = slice(first, first + step)
        part = (matrix[rows].float() / scales[rows, None]).nan_to_num(0, 0, 0)
        numbers[rows] = (
            (part.round() if dtype == torch.int8 else part).clamp(-largest, largest).to(dtype)
        )
    return numbers, scales


def _check(name: str, tensor: Tensor, fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {[*tensor.shape]}; expected {expected}"
        )


def _packed_width(ins: int) -> int:
    return -(-ins // CODE_BLOCK) * (CODE_BLOCK // 2)


def _pack_nibbles(codes: Tensor) -> Tensor:
    padded = pad(codes.to(torch.uint8), (0, -codes.shape[1] % CODE_BLOCK))
    low, high = padded.unflatten(1, (-1, 2, CODE_BLOCK // 2)).unbind(2)
    return (low | high << 4).flatten(1)


def _unpack_nibbles(packed: Tensor, ins: int) -> Tensor:
    halves = packed.unflatten(1, (-1, CODE_BLOCK // 2))
    return torch.stack([halves & 15, halves >> 4], dim=2).flatten(1)[:, :ins]
