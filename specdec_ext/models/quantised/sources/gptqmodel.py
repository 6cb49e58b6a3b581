"""GPTQ and AWQ checkpoints, which transformers loads with gptqmodel.

Its modules keep the tensors of the files. GPTQ (Frantar et al. 2023) packs inputs into words of 32 bits, AWQ
(Lin et al. 2024) packs outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec_ext.models.quantised.sources.source import Source, affine, expect, unpacked
from specdec_ext.ops.quantise import QuantisedWeight

# Of eight outputs, AWQ stores 0, 2, 4, 6, 1, 3, 5, 7 in a word: output i is in place _PLACES[i].
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class _Sizes:
    outs: int
    ins: int
    bits: int
    group_size: int

    @classmethod
    def of(cls, layer: Any) -> _Sizes:
        """The sizes of a layer, whose ``group_size`` is -1 if all inputs share a scale."""
        size = layer.in_features if layer.group_size == -1 else layer.group_size
        return cls(layer.out_features, layer.in_features, layer.bits, size)


def read(module: nn.Module) -> Source | None:
    layer: Any = module
    bases = {
        base.__name__ for base in type(module).__mro__ if base.__module__.startswith("gptqmodel.")
    }
    make: Callable[..., QuantisedWeight]
    names: tuple[str, ...]
    if "AWQuantLinear" in bases:
        make, names = _awq, ("qweight", "qzeros", "scales")
    elif "GPTQQuantLinear" in bases:
        # Most modules bring the zero points of the files into this form.
        make = partial(_gptq, less_one=not type(layer).REQUIRES_FORMAT_V2)
        names = ("qweight", "qzeros", "scales", "g_idx")
    else:
        return None
    found = [module._buffers.get(name) for name in names]
    tensors = [each for each in found if each is not None]
    if len(tensors) < len(names) or getattr(layer, "adapter", None) is not None:
        return None
    return Source(tensors, partial(make, _Sizes.of(layer), *tensors))


def _gptq(
    sizes: _Sizes, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, less_one: bool
) -> QuantisedWeight:
    """Read GPTQ's tensors.

    Args:
        qweight: ``[ins / n, outs]``, where a word holds n inputs.
        qzeros: ``[groups, outs / n]``.
        scales: ``[groups, outs]``.
        g_idx: ``[ins]`` group of each input.
        less_one: whether zero points are stored less one, as in files of the format "gptq"; in those of
            "gptq_v2" they are not.
    """
    outs, ins, bits = sizes.outs, sizes.ins, sizes.bits
    expect(bits in (8, 4) and sizes.group_size > 0, "8 or 4 bits, groups of inputs")
    n = 32 // bits
    expect(qweight.shape == (ins // n, outs) and ins % n == 0, "qweight [ins / n, outs]")
    expect(qzeros.shape == (len(scales), outs // n) and outs % n == 0, "qzeros [groups, outs / n]")
    expect(g_idx.shape == (ins,), "g_idx [ins]")
    order = torch.arange(ins, device=g_idx.device) // sizes.group_size
    expect(torch.equal(g_idx.long(), order), "inputs in the order of their groups")
    zeros = unpacked(qzeros, bits).T.to(torch.int16) + less_one
    return affine(unpacked(qweight.T, bits), zeros, scales.T, sizes.group_size, bits)


def _awq(sizes: _Sizes, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantisedWeight:
    """Read AWQ's tensors.

    Args:
        qweight, qzeros: ``[ins, outs / 8]`` and ``[groups, outs / 8]``.
        scales: ``[groups, outs]``.
    """
    outs, ins = sizes.outs, sizes.ins
    expect(sizes.bits == 4 and outs % 8 == 0, "4 bits, outputs in words of eight")
    expect(qweight.shape == (ins, outs // 8), "qweight [ins, outs / 8]")
    expect(qzeros.shape == (len(scales), outs // 8), "qzeros [groups, outs / 8]")
    codes, zeros = (
        unpacked(each, 4).unflatten(1, (-1, 8))[..., _PLACES].flatten(1).T
        for each in (qweight, qzeros)
    )
    return affine(codes, zeros, scales.T, sizes.group_size, 4)
