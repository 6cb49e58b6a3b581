"""``Source``: where the weight of a quantised layer is read from, and what the readers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_ext.ops.quantise import CODE_BLOCK, QuantisedWeight


@dataclass(frozen=True)
class Source:
    """The weight of a layer in the format of another library.

    Attributes:
        tensors: the tensors that it depends on.
        make: reads it; raises a ValueError for shapes and numbers that do not fit together.
    """

    tensors: list[Tensor]
    make: Callable[[], QuantisedWeight]

    def weight(self) -> QuantisedWeight | None:
        """The weight; None if the tensors do not fit together. The layer's own forward then tells why."""
        try:
            return self.make()
        except ValueError:
            return None


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"expected {what}")


def affine(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, group_size: int, bits: int
) -> QuantisedWeight:
    """Make a weight of ``(codes - zeros) * scales``.

    Args:
        codes: ``[outs, ins]`` unsigned numbers of ``bits`` bits.
        zeros: ``[outs, groups]`` zero points, which are whole numbers; None for the middle, 8 or 128.
        scales: ``[outs, groups]`` floating-point numbers. Offsets are exact if they have 16 bits.
        group_size: number of inputs that share a scale.
        bits: 8 or 4.
    """
    outs, ins = codes.shape
    groups = -(-ins // group_size) if group_size > 0 else 0
    expect(scales.shape == (outs, groups), f"scales [{outs}, {groups}]")
    expect(zeros is None or zeros.shape == scales.shape, "a zero point per scale")
    middle = 1 << bits - 1
    offsets = None
    if zeros is not None and bool((zeros != middle).any()):
        # Codes of 8 bits are signed in a QuantisedWeight.
        shifted = zeros.float() - (middle if bits == 8 else 0)
        offsets = -shifted * scales.float()
    if bits == 8:
        codes = codes.to(torch.int16) - middle
    return grouped(codes, scales, offsets, group_size, bits)


def grouped(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    group_size: int,
    bits: int,
    levels: Tensor | None = None,
) -> QuantisedWeight:
    """Pack a weight with groups of any multiple of 32.

    Sizes that :class:`QuantisedWeight` does not know, such as 96, are split into smaller ones of equal
    scales.
    """
    ins = codes.shape[1]
    if scales.shape[1] > 1:
        expect(group_size % CODE_BLOCK == 0, "groups of a multiple of 32 inputs")
        unit = group_size & -group_size  # the largest power of two in it
        split = torch.arange(-(-ins // unit), device=codes.device) // (group_size // unit)
        scales, offsets = scales[:, split], None if offsets is None else offsets[:, split]
    return QuantisedWeight.pack(codes, scales, offsets, bits=bits, levels=levels)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned numbers from int32 words, the lowest bits of a word first.

    Args:
        words: ``[..., words]`` int32.
        bits: 8 or 4.

    Returns:
        ``[..., words * 32 / bits]`` uint8.
    """
    expect(words.dtype == torch.int32 and words.ndim > 0, "int32 words")
    # The lowest byte comes first on every processor that the ops support.
    values = words.contiguous().view(torch.uint8)
    return values if bits == 8 else torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
