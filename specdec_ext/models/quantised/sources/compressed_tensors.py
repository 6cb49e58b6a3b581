"""Integer weights of compressed-tensors: parameters of plain ``nn.Linear`` modules.

The library keeps them compressed only until the first pass of the model: then a hook restores the numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec_ext.models.quantised.sources.source import Source, affine, expect, unpacked
from specdec_ext.ops.quantise import QuantisedWeight

_NAMES = ("weight_packed", "weight", "weight_scale", "weight_zero_point")


def read(module: nn.Module) -> Source | None:
    scheme: Any = getattr(module, "quantization_scheme", None)
    weights = getattr(scheme, "weights", None)
    if (
        not type(scheme).__module__.startswith("compressed_tensors.")
        or type(module) is not nn.Linear
        or weights is None
        or weights.type != "int"
        or weights.num_bits not in (8, 4)
        or scheme.input_activations is not None
        or scheme.output_activations is not None
        or getattr(weights, "actorder", None) not in (None, "static", "weight")
    ):
        return None
    found = {name: module._parameters.get(name) for name in _NAMES}
    tensors: dict[str, Tensor] = {name: each for name, each in found.items() if each is not None}
    stored = tensors.get("weight_packed", tensors.get("weight"))
    if stored is None or stored.is_floating_point() or "weight_scale" not in tensors:
        return None
    shape = (module.out_features, module.in_features)
    return Source([*tensors.values()], lambda: _read(shape, weights, tensors))


def _read(shape: tuple[int, int], weights: Any, tensors: dict[str, Tensor]) -> QuantisedWeight:
    """Read a weight of this shape ``(outs, ins)``.

    Args:
        weights: ``num_bits``, ``symmetric``, ``strategy`` and ``group_size`` of the scheme.
        tensors: ``weight_scale [outs, groups]``, with one group for the strategy "channel" and a single scale
            for "tensor"; signed codes, as int8 ``weight [outs, ins]`` or packed, with the smallest code as 0,
            in int32 ``weight_packed [outs, words]``; zero points likewise, ``weight_zero_point``, which are
            packed over the outputs: ``[words, groups]``.
    """
    (outs, ins), bits = shape, weights.num_bits
    middle = 1 << bits - 1
    scales = tensors["weight_scale"]
    if weights.strategy == "tensor":
        expect(scales.numel() == 1, "one scale")
        scales = scales.reshape(1, 1).expand(outs, 1)
    else:
        expect(weights.strategy in ("channel", "group"), "a scale per output or group")
        expect(scales.ndim == 2, "weight_scale [outs, groups]")
    packed, zeros = tensors.get("weight_packed"), tensors.get("weight_zero_point")
    if packed is None:
        codes = tensors["weight"]
        expect(codes.dtype == torch.int8 and codes.shape == shape, "an int8 weight")
        codes = codes.to(torch.int16) + middle
    else:
        expect(packed.shape == (outs, -(-ins * bits // 32)), "a packed weight")
        codes = unpacked(packed, bits)[:, :ins]
    if zeros is not None and zeros.dtype == torch.int32:
        expect(zeros.shape == (-(-outs * bits // 32), scales.shape[1]), "packed zero points")
        zeros = unpacked(zeros.T, bits)[:, :outs].T
    elif zeros is not None:
        each = (scales.shape[1], outs * scales.shape[1])
        expect(zeros.dtype == torch.int8 and zeros.numel() in each, "int8 zero points")
        zeros = zeros.reshape(-1, scales.shape[1]).expand(outs, -1).to(torch.int16) + middle
    expect(weights.symmetric or zeros is not None, "zero points")
    size = weights.group_size if weights.strategy == "group" else ins
    return affine(codes, None if weights.symmetric else zeros, scales, size, bits)
