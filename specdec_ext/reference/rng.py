"""Specification of the noise: Gumbel values as a function of (seed, row, position, token).

::

    bits = lane (token & 3) of Philox4x32-10(key = seed,
                                             counter = (token >> 2, position, row, purpose))
    v = min((bits + 0.5) * 2^-32, 1 - 2^-24)
    e = -log1p(-v)
    g = -log(e)

Two functions convert bits to noise. :func:`gumbel_float64` evaluates the formula. :func:`gumbel` is the
float32 algorithm of ``csrc/include/specdec/sampling/rng.h``, operation by operation and with the same result
in every bit; it emulates a float32 fma, which rounds once, in float64 (:func:`fma32`).

Source of Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

PURPOSE_MATCH = 0
PURPOSE_DRAFT = 1  # the drafter's own draws
PURPOSE_ACCEPT = 2  # accepting a draft token; the index is its number among its siblings
PURPOSE_RESIDUAL = 3  # the token that ends a round

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

# log(1 + f) = f - f^2/2 + f^3 P(f): the coefficients of P, highest power first.
_LOG1P_COEFFICIENTS = tuple(
    float.fromhex(text)
    for text in (
        "0x1.1457a6p-4",
        "-0x1.de3c16p-4",
        "0x1.e6f06ap-4",
        "-0x1.fc2208p-4",
        "0x1.233768p-3",
        "-0x1.555c4ep-3",
        "0x1.99a4b6p-3",
        "-0x1.000006p-2",
        "0x1.555548p-2",
    )
)
_LOG2 = float.fromhex("0x1.62e430p-1")
_SQRT_HALF_BITS = 0x3F3504F3


def philox4x32_10(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors of 32-bit words: 4 words of counter, 2 words of key."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _high_word(product1) ^ c1 ^ key0,
            product1 & _MASK,
            _high_word(product0) ^ c3 ^ key1,
            product0 & _MASK,
        )
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def noise_bits(
    seed: Tensor, row: Tensor, position: Tensor, vocab: int, purpose: int = PURPOSE_MATCH
) -> Tensor:
    """32 random bits for every token: ``[..., vocab]`` int64 for ``[...]`` int64 arguments."""
    groups = torch.arange((vocab + 3) // 4, device=seed.device)
    seed, row, position = (argument.unsqueeze(-1) for argument in (seed, row, position))
    counter = (groups, position & _MASK, row & _MASK, torch.full_like(groups, purpose))
    lanes = philox4x32_10(counter, (seed & _MASK, _high_word(seed)))
    lanes = torch.broadcast_tensors(*lanes)
    return torch.stack(lanes, dim=-1).flatten(-2)[..., :vocab]


def round_bits(
    seed: Tensor, row: Tensor, root_position: Tensor, depth: int, purpose: int, count: int
) -> Tensor:
    """Random bits for a node ``depth`` levels below the root of a round: ``count`` words of 32 bits.

    Root position and depth are separate words of the counter. Their sum, the absolute position, can occur
    again in the next round, and using the same noise twice would bias block verification.
    """
    return noise_bits(seed, row, root_position, count, purpose | depth << 8)


def gumbel_noise(seed: Tensor, row: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Gumbel noise for every token: ``[..., vocab]`` float32 for ``[...]`` int64 arguments."""
    return gumbel(noise_bits(seed, row, position, vocab))


def uniform(bits: Tensor) -> Tensor:
    """The uniform number v in float32, in [2^-33, 1 - 2^-24]."""
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def exponential(bits: Tensor) -> Tensor:
    """Exponential float32 values from 32-bit words (int64), bit for bit as in the compiled ops."""
    v = uniform(bits)
    mantissa, exponent = _split(1 - v)
    f = torch.where(exponent == 0, -v, mantissa - 1)
    return -fma32(exponent.float(), _LOG2, _log1p_core(f))


def gumbel(bits: Tensor) -> Tensor:
    """Gumbel float32 values from 32-bit words (int64), bit for bit as in the compiled ops."""
    mantissa, exponent = _split(exponential(bits))
    return -fma32(exponent.float(), _LOG2, _log1p_core(mantissa - 1))


def accept_uniform(bits: Tensor) -> Tensor:
    """Uniform float32 values on the grid (k + 0.5) * 2^-23, strictly between 0 and 1."""
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def gumbel_float64(bits: Tensor) -> Tensor:
    """The formula in float64, for measuring the error of :func:`gumbel`."""
    v = ((bits.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def fma32(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """``a * b + c`` in float32 with one rounding.

    The product of two float32 numbers is exact in float64. The sum is rounded to odd in float64. Rounding
    this to float32 equals rounding the exact sum once, because 53 >= 24 + 2 bits (Boldo and Melquiond 2008).
    """
    device = next((x.device for x in (a, b, c) if isinstance(x, Tensor)), torch.device("cpu"))
    a, b, c = (torch.as_tensor(x, dtype=torch.float32, device=device).double() for x in (a, b, c))
    product = a * b
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    bits = total.view(torch.int64)
    toward_error = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & (bits & 1 == 0), bits + toward_error, bits)
    return odd.view(torch.float64).float()


def _high_word(word64: Tensor) -> Tensor:
    return (word64 >> 32) & _MASK


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = mantissa * 2^exponent with mantissa in [sqrt(1/2), sqrt(2))."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    return (bits - exponent * (1 << 23)).view(torch.float32), exponent


def _log1p_core(f: Tensor) -> Tensor:
    p = torch.full_like(f, _LOG1P_COEFFICIENTS[0])
    for coefficient in _LOG1P_COEFFICIENTS[1:]:
        p = fma32(p, f, coefficient)
    return fma32(f * f, fma32(p, f, -0.5), f)
