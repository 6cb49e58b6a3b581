"""Specification of ``linear``: the order of summation of each output element.

Each of 16 lanes adds every 16th element of ``in_features`` (in bfloat16 every 16th pair, the second element
of the pair first) with fused multiply-add. The lanes are then added as a binary tree. Here, a float32 fused
multiply-add is a float64 product, which is exact, and a float64 sum that is rounded to float32. These two
roundings differ from one about once in 2^29 operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Arguments and output of ``specdec_ext.ops.linear``; float64 arguments are summed in float64."""
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    per_lane = 2 if input.dtype == torch.bfloat16 else 1
    inputs, weights = (_steps(tensor, per_lane) for tensor in (input, weight))
    lanes = input.new_zeros(*input.shape[:-1], len(weight), LANES, dtype=wide)
    for step in range(inputs.shape[-3]):
        for i in reversed(range(per_lane)):
            products = inputs[..., None, step, :, i] * weights[:, step, :, i]
            lanes = (lanes.double() + products).to(wide)
    while lanes.shape[-1] > 1:
        lower, upper = lanes.chunk(2, dim=-1)
        lanes = lower + upper
    total = lanes[..., 0]
    if bias is not None:
        total = total + bias.to(wide)
    return total.to(input.dtype)


def _steps(tensor: Tensor, per_lane: int) -> Tensor:
    """``[..., features]`` -> float64 ``[..., steps, LANES, per_lane]``, padded with zeros."""
    padding = -tensor.shape[-1] % (LANES * per_lane)
    return torch.nn.functional.pad(tensor.double(), (0, padding)).unflatten(
        -1, (-1, LANES, per_lane)
    )
