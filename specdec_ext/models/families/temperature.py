"""Attention temperature that depends on the position, which the model counts in slots (Llama 4,
arXiv 2501.19399)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.models.passes.visibility import current_block
from specdec_ext.models.patching.arguments import with_attributes
from specdec_ext.models.patching.forwards import Replacement


def temperature_of(model: PreTrainedModel) -> list[Replacement]:
    """Return the patch that scales the queries of a block by their columns; none for other models."""
    tuned = [
        module
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    ]
    return [(tuned, _scale_by_column)] if tuned else []


def _scale_by_column(attention: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    block = current_block()
    if block is None or block.columns is None:
        return forward(*args, **kwargs)
    steps = torch.floor((block.columns.float() + 1) / attention.floor_scale)
    scales = torch.log1p(steps) * attention.attn_scale + 1  # [rows, nodes]

    def project(hidden_states: Tensor) -> Tensor:
        queries = attention.q_proj(hidden_states)
        return (queries * scales[..., None]).to(queries.dtype)

    scaled = with_attributes(attention, attn_temperature_tuning=False, q_proj=project)
    return type(attention).forward(scaled, *args, **kwargs)
