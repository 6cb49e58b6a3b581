"""Positions at which a model's context ends, or from which on the same token is rotated in another way.

Learned positions end: a draft must not reach behind the last, even where the text ends before it. Some rotary
embeddings change with the longest text of a pass: "dynamic" ones with every token behind the trained length
(NTK scaling), "longrope" once (LongRoPE, Ding et al. 2024, has short and long factors), and Phi-3 reads its
whole text again there. The tokens of a block would all be rotated as its last one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

# Of how many tokens of the cache, or of the prompt, a call starts, and at how many columns it may end.
Span = tuple[int, int]


def max_positions(config: PreTrainedConfig) -> int | None:
    """Positions that the model was made for; None if its config does not tell."""
    count = getattr(config, "max_position_embeddings", None)
    return count if isinstance(count, int) and count > 0 else None


def rotation_change(config: PreTrainedConfig, span: Span) -> str | None:
    """Why a call over ``span`` can't have several tokens in a pass, if it can't."""
    start, end = span
    for limit, once in _changes(config):
        if end > limit and not (once and start > limit):
            return (
                f"its rotary embedding changes where the text crosses {limit} tokens, and this call may "
                f"reach {end} (max_new_tokens)"
            )
    return None


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
