"""``linear``: a matrix product whose rows do not depend on each other, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.ops import _library
from specdec_ext.ops.quantise import QuantisedWeight


def linear(
    input: Tensor,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None = None,
    *,
    many_rows: bool = False,
) -> Tensor:
    """``input @ weight.T + bias``, where the bits of each row do not depend on the other rows.

    Every output element is summed in float32 in a fixed order, which does not depend on the number of rows,
    their strides or the number of threads, and rounded once. There are two such orders: one for few rows,
    where reading the weights takes most of the time, and one for many, where multiplying does. CPU only; on
    other devices use ``torch.nn.functional.linear``.

    AVX2 and AVX-512 give the same bits, except that processors with ``avx512_bf16`` treat subnormal bfloat16
    numbers and partial sums as zero. Matrix units (AMX) multiply bfloat16 in one order of their own for all
    numbers of rows. ``SPECDEC_CPU_ISA`` chooses others, see :func:`cpu_instructions`.

    The product with a quantised weight is that of ``input.float()`` with ``weight.dequantise()``, bit for
    bit. But few rows of bfloat16 inputs are multiplied as integers of 16 bits, of which 64 share an exponent,
    unless codes stand for levels. That changes an input by at most 2^-15 of the largest of its 64, and not at
    all if it is at least 2^-7 of it. And many rows of bfloat16 inputs are multiplied with
    ``weight.dequantise().bfloat16()``.

    Args:
        input: ``[..., in_features]`` float32 or bfloat16; the last dimension is contiguous, and the others
            have at most two independent strides.
        weight: ``[out_features, in_features]`` of the same dtype, of which one dimension is contiguous; or a
            :class:`QuantisedWeight` of this shape. It is not copied or packed. If the first dimension is
            contiguous, as in ``conv.weight.T`` of GPT-2, all numbers become float32, and every product has
            the order for many rows.
        bias: ``[out_features]`` of the same dtype, contiguous, or None.
        many_rows: sum in the order for many rows (a prompt), which is the faster one from about 32 rows on.
            On matrix units, rows of bfloat16 have the same order in both.

    Returns:
        ``[..., out_features]`` contiguous.
    """
    if isinstance(weight, QuantisedWeight):
        return _library.native.linear(
            input, weight.codes, bias, many_rows, weight.scales, weight.levels
        )
    return _library.native.linear(input, weight, bias, many_rows)


def cpu_instructions() -> str:
    """Return which instructions the ops use on the CPU.

    They are the best that the processor has, or those that the environment variable ``SPECDEC_CPU_ISA`` names
    when the first op runs.

    Returns:
        ``"baseline"``, ``"avx2"`` or ``"avx512"``; ``"amx"`` for matrix units and AVX-512; ``"amx-emulated"``
        for the bits of matrix units on any processor, which is slow.
    """
    return _library.native.cpu_instructions()


@torch.library.register_fake("specdec::linear")
def _linear_fake(input: Tensor, weight: Tensor, *_: object) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])
