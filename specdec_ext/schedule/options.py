"""What a step of decoding may do: a plain step, a lookup, or a draft of some shape."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from specdec_ext.tree.config import Lookup, Shape, TreeConfig


class Source(Enum):
    """Where the draft of a step comes from."""

    PLAIN = "nowhere: the step is a plain step"
    LOOKUP = "a lookup in the text"
    MODEL = "a draft head or a draft model"


@dataclass(frozen=True)
class Chain:
    """Chains of all lengths, which share their acceptance by position and their draft costs."""


CHAIN = Chain()
# What acceptance and draft costs are learnt for: all chains, each tree, each kind of lookup.
Kind: TypeAlias = Chain | TreeConfig | Lookup


@dataclass(slots=True)
class Option:
    """What a step may do, and what that adds to a plain step.

    Attributes:
        source: where the draft comes from.
        shape: what the drafter is asked for; None for a plain step.
        tokens: expected accepted tokens, summed over the active rows.
        seconds: additional time.
        once: time that only the first of several such steps adds, because the drafter first reads the
            tokens that it has not seen.
    """

    source: Source
    shape: Shape | None
    tokens: float
    seconds: float
    once: float = 0.0


def kind_of(shape: Shape) -> Kind:
    """The kind of drafts that have this shape."""
    return CHAIN if isinstance(shape, TreeConfig) and shape.top_k == 1 else shape


def name_of(draft: Shape | Kind) -> str:
    """The name of a shape or of a kind of drafts in statistics and reports."""
    if isinstance(draft, Chain):
        return "chain"
    if isinstance(draft, Lookup):
        return draft.name
    if draft.top_k == 1:
        return f"chain of {draft.levels}"
    return f"tree of {draft.num_nodes} nodes, {draft.levels} levels"
