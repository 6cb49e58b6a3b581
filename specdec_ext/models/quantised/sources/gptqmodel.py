"""GPTQ and AWQ checkpoints, which transformers loads with gptqmodel.

Its modules keep the tensors of the files. GPTQ (Frantar et al. 2023) packs inputs into words of 32 bits, AWQ
(Lin et al. 2024) packs outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec_ext.models.quantised.sources.source import Source, affine, expect, unpacked
from specdec_ext.ops.quantise import QuantisedWeight

# Of eight outputs, AWQ stores 0, 2, 4, 6, 1, 3, 5, 7 in a word: output i is in place _PLACES[i].
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_TENSORS = ("qweight", "qzeros", "scales", "g_idx")


def read(module: nn.Module) -> Source | None:
    layer: Any = module
    bases = {
        base.__name__ for base in type(module).__mro__ if base.__module__.startswith("gptqmodel.")
    }
    if not bases or getattr(layer, "adapter", None) is not None:
        return None
    found = {name: module._buffers.get(name) for name in _TENSORS}
    tensors = {name: each for name, each in found.items() if each is not None}
    sizes = (layer.out_features, layer.in_features, layer.bits, layer.group_size)
    if "AWQuantLinear" in bases:
        make = partial(_awq, *sizes)
    elif "GPTQQuantLinear" in bases:
        # Most modules bring the files' zero points into this form.
        less_one = not type(layer).REQUIRES_FORMAT_V2
        make = partial(_gptq, *sizes, less_one)
    else:
        return None
    return Source([*tensors.values()], partial(make, **tensors))


def _gptq(
    outs: int,
    ins: int,
    bits: int,
    group_size: int,
    less_one: bool,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor,
) -> QuantisedWeight:
    """Read GPTQ's tensors.

    Args:
        less_one: whether zero points are stored less one, as in files of the format "gptq", or as they are,
            as in "gptq_v2".
        qweight: ``[ins / words, outs]``, where a word holds ``words = 32 / bits`` inputs.
        qzeros: ``[groups, outs / words]``.
        scales: ``[groups, outs]``.
        g_idx: ``[ins]`` group of each input.
    """
    words = _words(bits)
    order = torch.arange(ins, dtype=g_idx.dtype, device=g_idx.device) // _size(group_size, ins)
    expect(torch.equal(g_idx, order), "inputs in the order of their groups")
    expect(
        qweight.shape == (ins // words, outs) and ins % words == 0, "qweight [ins / words, outs]"
    )
    expect(
        qzeros.shape == (len(scales), outs // words) and outs % words == 0,
        "qzeros [groups, outs / words]",
    )
    zeros = unpacked(qzeros, bits).T.to(torch.int16) + less_one
    return affine(unpacked(qweight.T, bits), zeros, scales.T, _size(group_size, ins), bits)


def _awq(
    outs: int,
    ins: int,
    bits: int,
    group_size: int,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
) -> QuantisedWeight:
    """Read AWQ's tensors.

    Args:
        qweight, qzeros: ``[ins, outs / 8]`` and ``[groups, outs / 8]``.
        scales: ``[groups, outs]``.
    """
    expect(bits == 4, "4 bits")
    expect(qweight.shape == (ins, outs // 8) and outs % 8 == 0, "qweight [ins, outs / 8]")
    expect(qzeros.shape == (len(scales), outs // 8), "qzeros [groups, outs / 8]")
    codes, zeros = (
        unpacked(each, bits).unflatten(1, (-1, 8))[..., _PLACES].flatten(1).T
        for each in (qweight, qzeros)
    )
    return affine(codes, zeros, scales.T, _size(group_size, ins), bits)


def _words(bits: int) -> int:
    expect(bits in (8, 4), "8 or 4 bits")
    return 32 // bits


def _size(group_size: int, ins: int) -> int:
    return ins if group_size == -1 else group_size
