"""Specification of ``linear``: the order of summation of each output element.

Each of 16 lanes adds every 16th element of ``in_features`` (in bfloat16 every 16th pair, the second element
of the pair first) with fused multiply-add. The lanes are then added as a binary tree. With ``many_rows``,
there is one lane for each block of 256 elements, and the lanes are added one after the other. Codes are
first expanded to float32 weights, and multiplied in the order of float32; but few rows of bfloat16 inputs
become integers with a common exponent for each 64 (``csrc/include/specdec/linear.h``). Transposed weights
become float32, too, and have the order for many rows. Matrix units have orders of their own for bfloat16.

Here, a float32 fused multiply-add is a float64 product, which is exact, and a float64 sum that is rounded to
float32. These two roundings differ from one about once in 2^29 operations.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_ext.ops.quantise import QuantisedWeight

LANES = 16
BLOCK = 256  # elements
UNIT = 128  # inputs of the 16 lanes
SHARED = 64  # inputs with one exponent
TILE_PAIRS = 16


def linear(
    input: Tensor,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None = None,
    *,
    many_rows: bool = False,
    matrix_units: bool = False,
) -> Tensor:
    """Arguments and output of ``specdec_ext.ops.linear``; float64 arguments are summed in float64.

    ``matrix_units`` computes products of bfloat16 as matrix units do.
    """
    if isinstance(weight, QuantisedWeight):
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        bias = None if bias is None else bias.to(wide)
        if input.dtype == torch.bfloat16 and not many_rows and weight.levels is None:
            if matrix_units and (weight.scales.shape[1] == 1 or weight.group_size % SHARED == 0):
                return _round_on_units(_integer_sums(input, weight), bias)
            return _finish(_integer_lanes(input, weight), bias).to(input.dtype)
        if input.dtype == torch.bfloat16 and many_rows:
            rounded = weight.dequantise(wide).bfloat16()
            return linear(input, rounded, bias, many_rows=True, matrix_units=matrix_units)
        product = linear(input.to(wide), weight.dequantise(wide), bias, many_rows=many_rows)
        return product.to(input.dtype)
    if weight.stride(1) != 1 and weight.stride(0) == 1 and weight.shape[1] > 1:
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        bias = None if bias is None else bias.to(wide)
        product = linear(input.to(wide), weight.to(wide).contiguous(), bias, many_rows=True)
        return product.to(input.dtype)
    per_lane = 2 if input.dtype == torch.bfloat16 else 1
    if matrix_units and input.dtype == torch.bfloat16:
        return _round_on_units(_tiles(input, weight), bias)
    if many_rows:
        inputs, weights = (_steps(tensor, 1, per_lane) for tensor in (input, weight))
        blocks = [
            _lanes(own_inputs, own_weights, input.dtype)[..., 0]
            for own_inputs, own_weights in zip(
                inputs.split(BLOCK // per_lane, dim=-3),
                weights.split(BLOCK // per_lane, dim=-3),
                strict=True,
            )
        ]
        total = reduce(torch.add, blocks)
    else:
        inputs, weights = (_steps(tensor, LANES, per_lane) for tensor in (input, weight))
        return _finish(_lanes(inputs, weights, input.dtype), bias).to(input.dtype)
    return (total if bias is None else total + bias.to(total.dtype)).to(input.dtype)


def _tiles(input: Tensor, weight: Tensor) -> Tensor:
    """Return the sums ``[..., outs]`` of matrix units.

    The first elements of 16 pairs are summed, and the second ones.
    """
    inputs, weights = (_steps(tensor, TILE_PAIRS, 2) for tensor in (input, weight))
    total = inputs.new_zeros(*inputs.shape[:-3], len(weights), dtype=torch.float32)
    for step in range(inputs.shape[-3]):
        sums = inputs.new_zeros(*total.shape, 2, dtype=torch.float32)
        for pair in range(TILE_PAIRS):
            products = inputs[..., None, step, pair, :] * weights[:, step, pair]
            sums = (sums.double() + products).float()
        total = total + (sums[..., 0] + sums[..., 1])
    return total


def _round_on_units(total: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias and round to bfloat16; subnormal numbers become zero."""
    total = total if bias is None else total + bias.to(total.dtype)
    smallest = torch.finfo(torch.float32).smallest_normal
    return total.where(total.abs() >= smallest, total * 0).bfloat16()


def _finish(lanes: Tensor, bias: Tensor | None) -> Tensor:
    """Add the lanes as a binary tree, then the bias."""
    while lanes.shape[-1] > 1:
        lower, upper = lanes.chunk(2, dim=-1)
        lanes = lower + upper
    total = lanes[..., 0]
    return total if bias is None else total + bias.to(total.dtype)


def _integer_lanes(input: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return the sums ``[..., outs, lanes]`` of products of integers.

    Input ``64 u + 32 b + 16 h + 4 q + r`` belongs to lane ``8 (u % 2) + 4 b + q``.
    """
    integers, units = (each.unflatten(-2, (-1, 2)) for each in _integers(input, 15))
    units = units[..., 0]

    def in_lanes(tensor: Tensor) -> Tensor:
        """``[..., units, 2, 64]`` or ``[outs, ins]`` -> ``[..., units, lanes, 8]``."""
        if tensor.ndim == 2:
            tensor = pad(tensor, (0, -tensor.shape[-1] % UNIT)).unflatten(-1, (-1, 2, 64))
        return tensor.unflatten(-1, (2, 2, 4, 4)).movedim(-3, -2).flatten(-2).flatten(-4, -2)

    numbers, scales, offsets = weight.expand()
    x, codes, scales = in_lanes(integers), in_lanes(numbers), in_lanes(scales)[..., 0]
    terms = [(torch.einsum("...ulk,oulk->...oul", x, codes), scales)]
    if offsets is not None:
        sums = x.sum(-1)[..., None, :, :].expand_as(terms[0][0])
        terms.append((sums, in_lanes(offsets)[..., 0]))
    lanes = torch.zeros_like(terms[0][0][..., 0, :], dtype=torch.float32)
    for unit in range(codes.shape[-3]):
        own = units[..., None, unit, :].repeat_interleave(LANES // 2, dim=-1)
        for sums, factors in terms:
            products = sums[..., unit, :].float().double() * (factors[:, unit] * own).float()
            lanes = (lanes.double() + products).float()
    return lanes


def _integer_sums(input: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return the sums ``[..., outs]`` of products of integers on matrix units."""
    integers, units = _integers(input, 14)

    def in_steps(tensor: Tensor) -> Tensor:
        return pad(tensor, (0, -tensor.shape[-1] % UNIT)).unflatten(-1, (-1, SHARED))

    numbers, scales, offsets = weight.expand()
    codes, scales = in_steps(numbers), in_steps(scales)[..., 0]
    terms = [(torch.einsum("...sk,osk->...os", integers, codes), scales)]
    if offsets is not None:
        terms.append((integers.sum(-1)[..., None, :], in_steps(offsets)[..., 0]))
    total = torch.zeros_like(terms[0][0][..., 0], dtype=torch.float32)
    for step in range(codes.shape[-2]):
        for sums, factors in terms:
            factor = (factors[:, step] * units[..., None, step, 0]).float()
            total = (total.double() + sums[..., step].float().double() * factor).float()
    return total


def _integers(input: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return inputs as integers ``[..., n, 64]`` of a sign and so many bits, and units ``[..., n, 1]``."""
    inputs = pad(input.double(), (0, -input.shape[-1] % UNIT)).unflatten(-1, (-1, SHARED))
    largest = inputs.abs().amax(-1, keepdim=True)
    exponents = torch.frexp(largest).exponent.where(largest > 0, -111).clamp(min=-111)
    units = torch.ldexp(torch.ones_like(largest), exponents - bits)
    units = units.where(largest.isfinite(), torch.nan)
    return torch.ldexp(inputs, bits - exponents).round().where(largest.isfinite(), 0), units


def _lanes(inputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums ``[..., outs, lanes]`` of the products of steps, one step after the other."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    steps, lanes, per_lane = weights.shape[-3:]
    sums = inputs.new_zeros(*inputs.shape[:-3], len(weights), lanes, dtype=wide)
    for step in range(steps):
        for i in reversed(range(per_lane)):
            products = inputs[..., None, step, :, i] * weights[:, step, :, i]
            sums = (sums.double() + products).to(wide)
    return sums


def _steps(tensor: Tensor, lanes: int, per_lane: int) -> Tensor:
    """``[..., features]`` -> float64 ``[..., steps, lanes, per_lane]``, padded with zeros."""
    padding = -tensor.shape[-1] % (lanes * per_lane)
    return pad(tensor.double(), (0, padding)).unflatten(-1, (-1, lanes, per_lane))
