"""Specification of ``exp`` for softmax weights: ``csrc/include/specdec/math/exp.h``, step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.reference.rng import fma32

SMALLEST_EXPONENT = -87.0

_LOG2_E = float.fromhex("0x1.715476p+0")
_LOG2_HIGH = float.fromhex("0x1.62e400p-1")
_LOG2_LOW = float.fromhex("0x1.7f7d1cp-20")
_TO_INTEGER = float.fromhex("0x1.8p+23")
# e^r = 1 + r + r^2 P(r): the coefficients of P, highest power first.
_COEFFICIENTS = tuple(
    float.fromhex(text)
    for text in (
        "0x1.6a241ap-10",
        "0x1.1239f2p-7",
        "0x1.5558f2p-5",
        "0x1.555492p-3",
        "0x1.fffffcp-2",
    )
)


def exp_nonpositive(x: Tensor) -> Tensor:
    """exp(min(x, 0)) of float32 ``x``, with the bits of the compiled ops; 0 below -87."""
    x = x.clamp(max=0.0)
    clamped = x.clamp(min=SMALLEST_EXPONENT)
    n = fma32(clamped, _LOG2_E, _TO_INTEGER) - _TO_INTEGER
    r = fma32(n, -_LOG2_LOW, fma32(n, -_LOG2_HIGH, clamped))
    p = torch.full_like(r, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        p = fma32(p, r, coefficient)
    value = torch.ldexp(1 + fma32(r * r, p, r), n.int())
    return torch.where(x < SMALLEST_EXPONENT, 0.0, value)
