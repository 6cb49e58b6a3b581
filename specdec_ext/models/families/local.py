"""Causal masks by slot that are buffers of attention modules; GPT-Neo's local layers have a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_ext.models.passes.visibility import current_block
from specdec_ext.models.patching.arguments import Sliced, with_attributes
from specdec_ext.models.patching.forwards import Replacement


def local_attention_of(model: PreTrainedModel) -> list[Replacement]:
    """Return the patch that indexes these buffers by column instead of slot.

    Returns:
        An empty list for a model without such buffers: ``bias [1, 1, slots, slots]`` bool, True where a query
        sees a key.
    """
    modules = [module for module in model.modules() if _is_causal(module._buffers.get("bias"))]
    return [(modules, _attend_by_column)] if modules else []


def _is_causal(bias: Tensor | None) -> bool:
    return bias is not None and bias.dtype == torch.bool and bias.ndim == 4


def _attend_by_column(
    attention: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    block = current_block()
    if block is None or block.columns is None:
        return forward(*args, **kwargs)
    bias: Any = attention.bias
    visible = bias[0, 0, block.columns[:, :, None], block.key_columns[:, None, :]]
    by_column = with_attributes(attention, bias=Sliced(visible[:, None], bias.shape))
    return type(attention).forward(by_column, *args, **kwargs)
