"""Attention biased by distance (ALiBi, arXiv 2108.12409), exact for trees and ragged rows.

The bias of a key grows linearly with its position. Models take the slot for the position, but in a block the
two differ. The slopes are not needed: each key gets the bias that the model has computed for the slot whose
number is the key's position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_ext.models.passes.visibility import BlockVisibility, current_block
from specdec_ext.models.patching.arguments import Sliced, call_with, innermost_taking
from specdec_ext.models.patching.forwards import Replacement


def alibi_of(model: PreTrainedModel) -> list[Replacement]:
    """Return the patches that reorder the biases of a block by position; none for a model without ALiBi."""
    by_key = innermost_taking(model, "alibi")  # Bloom, Falcon
    builds = any("alibi" in name for name in dir(model.get_decoder()))
    by_distance = innermost_taking(model, "position_bias") if builds else []  # MPT
    found: list[Replacement] = [(by_key, _bias_by_key), (by_distance, _bias_by_distance)]
    return [(modules, compute) for modules, compute in found if modules]


def _bias_by_key(attention: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Bias by slope x position of the key; softmax cancels a term that is common to all keys of a query."""
    block = current_block()
    if block is None:
        return forward(*args, **kwargs)

    def by_position(arguments: dict[str, Any]) -> dict[str, Any]:
        alibi = arguments["alibi"]
        if alibi is None:
            return {}  # a Falcon with rotary positions
        keys = alibi.view(len(block.key_positions), -1, alibi.shape[-1])  # [rows, heads, keys]
        moved = keys.gather(-1, block.key_positions[:, None].expand_as(keys)).view_as(alibi)
        if alibi.ndim == 3:  # Bloom, [rows * heads, 1, keys]
            return {"alibi": moved}
        # Falcon, [rows, heads, 1, keys], has also added the bias, scaled like the scores, to the mask.
        mask = arguments["attention_mask"]
        hidden = torch.finfo(mask.dtype).min
        scaled = moved / math.sqrt(attention.head_dim)
        return {"alibi": moved, "attention_mask": torch.where(mask == hidden, hidden, scaled)}

    return call_with(attention, forward, args, kwargs, by_position)


def _bias_by_distance(
    attention: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Bias by distance: MPT's bias is ``[heads, 1, slots]``, 0 at the last slot (the query's); padding
    counts."""
    block = current_block()
    if block is None or block.columns is None:
        return forward(*args, **kwargs)

    def by_columns(arguments: dict[str, Any]) -> dict[str, Any]:
        bias = arguments["position_bias"]
        return {"position_bias": Sliced(_at_distance(bias, block), bias.shape)}

    return call_with(attention, forward, args, kwargs, by_columns)


def _at_distance(bias: Tensor, block: BlockVisibility) -> Tensor:
    """Gather the bias ``[heads, 1, slots]`` at each query's distance: ``[rows, heads, nodes, keys]``."""
    assert block.columns is not None
    distance = block.columns[:, :, None] - block.key_columns[:, None, :]
    slots = bias.shape[-1] - 1 - distance.clamp(min=0)
    return bias[:, 0, slots].transpose(0, 1)
