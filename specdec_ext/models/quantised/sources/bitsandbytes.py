"""4-bit weights of bitsandbytes: codes of 16 levels, NF4 or FP4 (Dettmers et al. 2023).

Its 8-bit weights are not read, because LLM.int8() quantises the inputs, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec_ext.models.quantised.sources.source import Source, expect, grouped
from specdec_ext.ops.quantise import QuantisedWeight


def read(module: nn.Module) -> Source | None:
    packed: Any = module._parameters.get("weight")
    kind = type(packed)
    if kind.__name__ != "Params4bit" or not kind.__module__.startswith("bitsandbytes."):
        return None
    state = packed.quant_state
    # On processors with bfloat16 arithmetic, the first pass brings the codes into another order.
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return None
    tensors = [packed, state.absmax, state.code]
    if state.nested:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    return Source(tensors, lambda: _read(packed.data, state))


def _read(packed: Tensor, state: Any) -> QuantisedWeight:
    """Read a weight.

    Args:
        packed: bytes of two codes each, the first one in the high half, of all rows one after another.
        state: ``shape`` ``[outs, ins]``, ``code`` (the 16 levels), ``blocksize``, and ``absmax``, a float32
            scale per block; if ``nested``, 8-bit codes of the scales less ``offset``, with a state of their
            own.
    """
    outs, ins = state.shape
    expect(state.blocksize > 0, "blocks of weights")
    values = packed.contiguous().view(torch.uint8).flatten()
    expect(len(values) * 2 == outs * ins, "a code per weight")
    expect(ins % state.blocksize == 0, "blocks that end with a row")
    codes = torch.stack([values >> 4, values & 15], dim=-1).view(outs, ins)
    scales = state.absmax
    if state.nested:
        outer = state.state2
        expect(len(outer.code) == 256 and scales.dtype == torch.uint8, "scales of 8 bits")
        expect(outer.blocksize > 0, "blocks of scales")
        per_scale = outer.absmax.repeat_interleave(outer.blocksize)[: len(scales)]
        expect(len(per_scale) == len(scales), "a scale per block of scales")
        scales = outer.code[scales.long()] * per_scale + state.offset
    expect(scales.numel() * state.blocksize == outs * ins, "a scale per block")
    return grouped(
        codes, scales.float().view(outs, -1), None, state.blocksize, 4, state.code.float()
    )
