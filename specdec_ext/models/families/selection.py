"""Sparse attention that selects tokens: every node of a block selects as in a pass of its own.

The best tokens are found by sorting scores. Which of two equal scores comes first depends on the number of
scores and on all others. Equal scores are common: all products of a token with the heads may be rectified to
zero (DeepSeek's indexer), and equal tokens have equal scores before positions are applied (Doge). Therefore
each node sorts only the columns of its own text, as in transformers' own loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.models.compat import cache_argument
from specdec_ext.models.passes.visibility import BlockVisibility, current_block
from specdec_ext.models.patching.arguments import call_with, with_attributes
from specdec_ext.models.patching.forwards import Replacement


def selection_of(model: PreTrainedModel) -> list[Replacement]:
    """Return the patches that make each node of a block select for itself; none without token selection."""
    # An indexer that pools tokens (index_kpool) pools by slot, which this patch can't change.
    indexers = [
        m for m in model.modules() if hasattr(m, "index_topk") and not hasattr(m, "index_kpool")
    ]
    dynamic = [m for m in model.modules() if hasattr(m, "prepare_dynamic_mask")]
    found: list[Replacement] = [(indexers, _select_alone), (dynamic, _mask_alone)]
    return [(modules, compute) for modules, compute in found if modules]


class _Keys:
    """A stand-in for a cache: it returns given index keys."""

    def __init__(self, keys: Tensor):
        self._keys = keys

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return self._keys


def _select_alone(
    indexer: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Return the selected slots ``[rows, nodes, topk]``; a shorter text repeats its first selected slot."""
    block = current_block()
    together = forward(*args, **kwargs)  # also appends the index keys of the block to the cache
    if block is None or block.columns is None:
        return together
    selected = torch.empty_like(together)

    def alone(
        arguments: dict[str, Any], rows: Tensor, nodes: Tensor, slots: Tensor
    ) -> dict[str, Any]:
        def pick(tensor: Tensor) -> Tensor:
            return tensor.expand(len(block.block), *tensor.shape[1:])[rows, nodes][:, None]

        cache: Any = cache_argument(arguments)
        layer = arguments[cache].layers[indexer.layer_idx]
        # Some indexers compute queries from the hidden states alone, and some scale them by position.
        optional = ("q_resid", "position_ids")
        given = [name for name in optional if arguments.get(name) is not None]
        return {
            **{name: pick(arguments[name]) for name in given},
            "hidden_states": pick(arguments["hidden_states"]),
            "position_embeddings": tuple(map(pick, arguments["position_embeddings"])),
            "attention_mask": pick(arguments["attention_mask"]).gather(-1, slots[:, None]),
            cache: _Keys(layer.indexer_keys[rows[:, None], slots]),
        }

    for rows, nodes, slots in block.texts():
        change = partial(alone, rows=rows, nodes=nodes, slots=slots)
        columns = call_with(indexer, forward, args, kwargs, change)[:, 0].long()
        chosen = slots.gather(-1, columns).to(selected.dtype)
        missing = selected.shape[-1] - chosen.shape[-1]
        selected[rows, nodes] = torch.cat([chosen, chosen[:, :1].expand(-1, missing)], dim=-1)
    return selected


def _mask_alone(attention: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run Doge's attention with a mask of the tokens that each node selects."""
    block = current_block()
    if block is None or block.columns is None:
        return forward(*args, **kwargs)
    selecting = with_attributes(
        attention, prepare_dynamic_mask=partial(_dynamic_mask, attention, block)
    )
    return type(attention).forward(selecting, *args, **kwargs)


def _dynamic_mask(
    attention: Any,
    block: BlockVisibility,
    hidden_states: Tensor,
    dt_states: Tensor,
    keep_window_size: int,
    attention_mask: Tensor,
) -> Tensor:
    """Compute the additive mask ``[rows, heads, nodes, keys]`` from ``dt_states [rows, heads, keys]``."""
    shape = (*dt_states.shape[:2], *attention_mask.shape[2:])
    mask = hidden_states.new_full(shape, torch.finfo(hidden_states.dtype).min)
    heads = torch.arange(shape[1], device=mask.device)[None, :, None]
    for rows, nodes, slots in block.texts():
        every_head = slots[:, None].expand(-1, shape[1], -1)
        alone = attention.prepare_dynamic_mask(
            hidden_states=hidden_states[rows, nodes][:, None],
            dt_states=dt_states[rows].gather(-1, every_head),
            keep_window_size=keep_window_size,
            attention_mask=attention_mask[rows, 0, nodes].gather(-1, slots)[:, None, None],
        )
        mask[rows[:, None, None], heads, nodes[:, None, None], every_head] = alone[:, :, 0]
    return mask
