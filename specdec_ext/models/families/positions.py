"""Positions for models whose ``forward`` takes no ``position_ids``, or that also count slots.

Such a model counts columns itself, starting from the length of its cache. In a block, slots are not columns:
siblings have the same column, and the rows of a ragged batch end in different columns. During a block pass
(``masks.visibility``) every node gets the position that it would have in a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_ext.models.compat import CACHE_LENGTH
from specdec_ext.models.passes.visibility import current_block
from specdec_ext.models.patching.arguments import call_with, innermost_taking, takes
from specdec_ext.models.patching.forwards import Replacement


def positions_of(model: PreTrainedModel) -> list[Replacement]:
    """Return the patches that give the nodes of a block their positions.

    Args:
        model: a causal language model.

    Returns:
        An empty list if ``forward`` takes ``position_ids``, or if there is no place to set positions: neither
        embeddings that count from the length of the cache, nor a decoder that takes ``position_ids`` which
        the model does not pass.
    """
    if takes(model, "position_ids"):
        return []
    if counting := innermost_taking(model, CACHE_LENGTH):
        rotated = innermost_taking(model, "sinusoidal_pos")
        return [(counting, _embed_columns), (rotated, _rotate_by_row)]
    decoder = model.get_decoder()
    if decoder is not None and takes(decoder, "position_ids"):
        return [([decoder], _pass_columns)]
    return []


def distances_of(model: PreTrainedModel) -> list[Replacement]:
    """Return the patch that gives the nodes of a block their distances from keys, for Inkling's biases."""
    found: list[Replacement] = [
        (innermost_taking(model, "key_positions"), _bias_row_by_row),
        (innermost_taking(model, "relative_distance"), _bias_of_rows),
    ]
    return [(biases, compute) for biases, compute in found if biases]


def _bias_row_by_row(
    module: nn.Module,
    forward: Callable[..., Tensor],
    relative_states: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
) -> Tensor:
    """Compute the bias ``[rows, heads, nodes, keys]`` row by row, with the columns of each row."""
    block = current_block()
    if block is None or block.columns is None:
        return forward(relative_states, query_positions, key_positions)
    keys = block.key_columns[:, -len(key_positions) :]
    rows = zip(relative_states.split(1), block.columns, keys, strict=True)
    return torch.cat([forward(*row) for row in rows])


def _bias_of_rows(
    module: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Give each row its own distances ``[rows, 1, nodes, keys]`` instead of ``[nodes, keys]`` for all."""
    block = current_block()
    if block is None or block.columns is None:
        return forward(*args, **kwargs)
    columns, key_columns = block.columns, block.key_columns

    def of_rows(arguments: dict[str, Any]) -> dict[str, Any]:
        keys = key_columns[:, -arguments["relative_distance"].shape[-1] :]
        return {"relative_distance": (columns[:, :, None] - keys[:, None])[:, None]}

    return call_with(module, forward, args, kwargs, of_rows)


def _embed_columns(
    embedding: nn.Module, forward: Callable[..., Tensor], tokens: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """Embed each node as a single token after the columns before it, ``[rows, nodes, dim]``.

    ``tokens`` is ``[rows, nodes]``, or only that shape. The embedding is called once per column, so that it
    applies its own offsets.
    """
    block = current_block()
    if block is None or block.columns is None:
        return forward(tokens, *args, **kwargs)
    embedded: Tensor | None = None
    for column in block.columns.unique():
        there = block.columns == column
        single = tokens[there][:, None] if isinstance(tokens, Tensor) else (int(there.sum()), 1)
        given = {"position_ids": column[None]} if takes(embedding, "position_ids") else {}
        vectors = forward(single, int(column), **given)
        if embedded is None:
            embedded = vectors.new_empty(*there.shape, vectors.shape[-1])
        embedded[there] = vectors.view(-1, vectors.shape[-1])
    assert embedded is not None  # a block has nodes
    return embedded


def _rotate_by_row(
    attention: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Move the rows to the front: RoFormer assumes that all rows have the same positions, and adds dimensions
    for rows and heads in front."""

    def rows_first(arguments: dict[str, Any]) -> dict[str, Any]:
        positions = arguments["sinusoidal_pos"]
        if positions.ndim == 5:  # [1, 1, rows, nodes, dim]
            positions = positions[0].transpose(0, 1)
        return {"sinusoidal_pos": positions}

    return call_with(attention, forward, args, kwargs, rows_first)


def _pass_columns(
    decoder: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    block = current_block()
    if block is not None and block.columns is not None:
        kwargs = {**kwargs, "position_ids": block.columns}
    return forward(*args, **kwargs)
