"""Positions at which a model's context ends, or from which on the same token is rotated in another way.

Learned positions end: a draft must not reach behind the last, even where the text ends before it. Some rotary
embeddings change with the longest text of a pass: "dynamic" ones with every token behind the trained length
(NTK scaling), "longrope" once (LongRoPE, Ding et al. 2024, has short and long factors), and Phi-3 reads its
whole text again there. The tokens of a block would all be rotated as its last one is. Others scale queries
from some length on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedConfig


class Span(NamedTuple):
    """Where a call begins and may end.

    Attributes:
        rows: of the batch.
        start: tokens of the shortest row, or of the cache if that holds fewer.
        end: columns at which it may end.
    """

    rows: int
    start: int
    end: int


def max_positions(config: PreTrainedConfig) -> int | None:
    """Positions that the model was made for; None if its config does not tell."""
    count = getattr(config, "max_position_embeddings", None)
    return count if isinstance(count, int) and count > 0 else None


def rotation_change(config: PreTrainedConfig, span: Span) -> str | None:
    """Why a call over ``span`` can't have several tokens in a pass, if it can't."""
    for limit, once in _changes(config):
        if span.end > limit and not (once and span.start > limit):
            return (
                f"its rotary embedding changes where the text crosses {limit} tokens, and this call may "
                f"reach {span.end} (max_new_tokens)"
            )
    return None


def selection_change(config: PreTrainedConfig, span: Span) -> str | None:
    """Why a call over ``span`` can't be speculated on, if it can't.

    From some length on Doge attends to the best of the tokens alone. Equal ones tie but for rounding.
    """
    limit = getattr(config, "keep_window_size", None)
    if limit is None or span.end <= limit:
        return None
    return (
        f"from {limit} tokens on it keeps the best of them, equal ones as they happen to be rounded, and "
        f"this call may reach {span.end} (max_new_tokens)"
    )


def scale_change(config: PreTrainedConfig, span: Span) -> str | None:
    """Why a call over ``span`` can't have trees and ragged rows, if it can't.

    From some column on Inkling scales queries, counting columns by cache slots.
    """
    limit = getattr(config, "log_scaling_n_floor", None)
    if limit is None or span.end <= limit:
        return None
    return (
        f"from {limit} tokens on it scales attention by the cache slots of tokens, and this call may "
        f"reach {span.end} (max_new_tokens)"
    )


def _changes(config: PreTrainedConfig) -> Iterator[tuple[int, bool]]:
    """(tokens up to which nothing changes, whether it changes once)."""
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type")
        if kind == "dynamic" and (limit := max_positions(config)) is not None:
            yield limit, False
        if kind == "longrope":
            yield rope["original_max_position_embeddings"], True


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """One for the model, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer = [each for each in parameters.values() if isinstance(each, dict)]
    return per_layer or [parameters]
