"""8-bit weights of draft heads: an 8-bit number per weight and a float32 scale per output."""

from __future__ import annotations

import torch
from torch import Tensor

_FORMATS = {"same": None, "int8": torch.int8, "float8": torch.float8_e4m3fn}
_AT_ONCE = 1 << 24  # elements of a matrix that are converted to float32 at a time


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
