"""The row-invariant matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.ops import _library


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``, each row the same bits whatever rows are computed with it.

    Every output element is summed in float32 in one fixed order, whatever the number of rows, their
    strides and the number of threads, and rounded once. Made for few rows, where reading the weights is
    the work. CPU only; elsewhere ``torch.nn.functional.linear``.

    The bits are the same on AVX2 and AVX-512, except that processors with ``avx512_bf16`` take subnormal
    bfloat16 numbers and partial sums as zero.

    Args:
        input: ``[..., in_features]`` float32 or bfloat16; the last dimension is contiguous, the others
            lie at no more than two independent strides.
        weight: ``[out_features, in_features]`` of the same dtype, the last dimension contiguous. It is
            read where it is; there is no packed copy to keep up to date.
        bias: ``[out_features]`` of the same dtype, contiguous, or None.

    Returns:
        ``[..., out_features]`` contiguous.
    """
    return _library.native.linear(input, weight, bias)


@torch.library.register_fake("specdec::linear")
def _linear_fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])
