"""Weight-only tensors of torchao, which are the ``weight`` of plain ``nn.Linear`` modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specdec_ext.models.quantised.sources.source import Source, affine, expect, grouped
from specdec_ext.ops.quantise import QuantisedWeight

# What a tensor has if the input is quantised or scaled, in addition to the weight.
_OF_THE_INPUT = (
    "act_quant_kwargs",
    "act_pre_scale",
    "act_mapping_type",
    "activation_quantization",
)
_AT_ONCE = 256  # inputs whose codes the packed product returns at a time


def read(module: nn.Module) -> Source | None:
    weight: Any = module._parameters.get("weight")
    kind = type(weight)
    make = _READERS.get(kind.__name__)
    if make is None or not kind.__module__.startswith("torchao.") or weight.ndim != 2:
        return None
    if any(getattr(weight, name, None) is not None for name in _OF_THE_INPUT):
        return None
    names = (*weight.tensor_data_names, *getattr(weight, "optional_tensor_data_names", ()))
    tensors = [getattr(weight, name, None) for name in names]
    return Source([each for each in tensors if each is not None], lambda: make(weight))


def _integers(weight: Any) -> QuantisedWeight:
    """Read a tensor with an int8 ``qdata [outs, ins]``, and a ``scale`` and ``zero_point`` per block."""
    codes, scales, zeros = weight.qdata, weight.scale, weight.zero_point
    outs, ins = codes.shape
    high, size = weight.block_size
    expect(
        codes.dtype == torch.int8 and high in (1, outs) and size > 0, "int8 codes, blocks of rows"
    )
    blocks = (outs // high, -(-ins // size))
    expect(scales.numel() == blocks[0] * blocks[1], "a scale per block")
    expect(zeros is None or zeros.numel() == scales.numel(), "a zero point per scale")
    scales = scales.reshape(blocks).expand(outs, -1)
    zeros = None if zeros is None or not zeros.any() else zeros.reshape(blocks).expand(outs, -1)
    if str(getattr(weight, "target_dtype", None)) == "torch.int4":
        zeros = None if zeros is None else zeros + 8
        return affine(codes + 8, zeros, scales, size, 4)
    offsets = None if zeros is None else -zeros.float() * scales.float()
    return grouped(codes, scales, offsets, size, 8)


def _packed_for_cpu(weight: Any) -> QuantisedWeight:
    """Read codes in the order of torch's product for the CPU, which depends on the processor.

    The order is private. The product of the unit matrix, with scales of one, returns the codes less 8. A
    weight is ``(code - 8) * scale + zero``, with ``scale_and_zero [groups, outs, 2]``.
    """
    (outs, ins), packed = weight.shape, weight.qdata
    pairs, size = weight.scale_and_zero, weight.block_size[1]
    # The product reads memory by these sizes without a check of all of them.
    expect(packed.dtype == torch.uint8 and packed.is_contiguous(), "packed bytes")
    expect(packed.shape == (outs, ins // 2) and ins % 2 == 0, "a byte per two codes")
    expect(size in (32, 64, 128, 256) and ins % size == 0, "whole groups")
    expect(pairs.shape == (ins // size, outs, 2), "a scale and a zero per group")
    units = torch.zeros_like(pairs, dtype=torch.float32)
    units[..., 0] = 1
    codes = torch.empty(outs, ins, dtype=torch.int8, device=packed.device)
    for first in range(0, ins, _AT_ONCE):
        rows = torch.eye(min(_AT_ONCE, ins - first), ins, device=packed.device)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows.roll(first, dims=1), packed, size, units
        )
        codes[:, first : first + len(rows)] = product.T.to(torch.int8)
    scales, zeros = pairs.float().permute(1, 0, 2).unbind(-1)
    return grouped(codes + 8, scales, zeros - 8 * scales, size, 4)


_READERS: dict[str, Callable[[Any], QuantisedWeight]] = {
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Int4OpaqueTensor": _packed_for_cpu,
}
