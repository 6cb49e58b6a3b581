"""Limits on the length of a text: the last position of a model, and lengths where its computation changes.

Learned positions end. A draft must not reach beyond the last one, even if the text itself ends before it.

Some rotary embeddings depend on the longest text of a pass: "dynamic" ones change with every token after the
trained length (NTK scaling), "longrope" ones change once (LongRoPE, Ding et al. 2024, has short and long
factors; Phi-3 also reads its whole text again there). In a pass over a block, all tokens would be rotated
like the last one. Some other models scale queries from some length on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedConfig


class Span(NamedTuple):
    """Batch size and lengths of a call.

    Attributes:
        rows: number of rows of the batch.
        start: number of tokens of the shortest row, or of the cache if that holds fewer.
        end: number of columns at which the call may end.
    """

    rows: int
    start: int
    end: int


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of positions of the model; None if its config does not say."""
    count = getattr(config, "max_position_embeddings", None)
    return count if isinstance(count, int) and count > 0 else None


def rotation_change(config: PreTrainedConfig, span: Span) -> str | None:
    """Return why a call over ``span`` must decode one token at a time, None if it need not."""
    for limit, once in _changes(config):
        if span.end > limit and not (once and span.start > limit):
            return (
                f"its rotary embedding changes when the text exceeds {limit} tokens, and this call may reach "
                f"{span.end} (max_new_tokens)"
            )
    return None


def has_fixed_rotations(config: PreTrainedConfig) -> bool:
    """Whether the rotation of a position is the same in texts of all lengths."""
    return not any(_changes(config))


def selection_change(config: PreTrainedConfig, span: Span) -> str | None:
    """Return why a call over ``span`` must decode one token at a time, None if it need not.

    From some length on, Doge attends only to the tokens with the highest scores. Rounding, which differs
    between passes, decides between equal tokens.
    """
    limit = getattr(config, "keep_window_size", None)
    if limit is None or span.end <= limit:
        return None
    return (
        f"from {limit} tokens on it attends to the best-scored tokens only, where rounding decides between "
        f"equal ones, and this call may reach {span.end} (max_new_tokens)"
    )


def scale_change(config: PreTrainedConfig, span: Span) -> str | None:
    """Return why a call over ``span`` can't use trees and ragged rows, None if it can.

    From some column on, Inkling scales queries, and it takes the cache slot for the column.
    """
    limit = getattr(config, "log_scaling_n_floor", None)
    if limit is None or span.end <= limit:
        return None
    return (
        f"from {limit} tokens on it scales attention by the cache slots of tokens, and this call may reach "
        f"{span.end} (max_new_tokens)"
    )


def _changes(config: PreTrainedConfig) -> Iterator[tuple[int, bool]]:
    """Yield (number of tokens up to which the rotation is constant, whether it changes only once)."""
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type")
        if kind == "dynamic" and (limit := max_positions(config)) is not None:
            yield limit, False
        if kind == "longrope":
            yield rope["original_max_position_embeddings"], True


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rope parameters: one entry for the model, or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer = [each for each in parameters.values() if isinstance(each, dict)]
    return per_layer or [parameters]
