"""What a step of decoding may do: a plain step, a lookup, or a draft of some shape."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_ext.schedule.acceptance import CHAIN
from specdec_ext.tree.config import Shape, TreeConfig

# Sources of an option. The third is ``LOOKUP``, a lookup.
PLAIN, MODEL = "plain", "model"
_TREE = "tree of "


@dataclass(frozen=True)
class Candidate:
    """A shape that the drafter offers.

    Attributes:
        levels: number of levels below the root.
        nodes: number of nodes, the root included.
    """

    shape: TreeConfig
    levels: int
    nodes: int


@dataclass(slots=True)
class Option:
    """What a step may do, and what that adds to a plain step.

    Attributes:
        source: ``PLAIN``, ``LOOKUP`` (a lookup) or ``MODEL`` (a draft that a model makes).
        shape: what the drafter is asked for; None for a plain step.
        tokens: expected accepted tokens, summed over the active rows.
        seconds: additional time.
        once: time that only the first of several such steps adds, because the drafter first reads the
            tokens that it has not seen.
    """

    source: str
    shape: Shape | None
    tokens: float
    seconds: float
    once: float = 0.0


def family_of(shape: Shape) -> str:
    """The name under which acceptance and draft costs are kept: one for all chains, one for each tree."""
    if isinstance(shape, str):
        return shape
    return CHAIN if shape.top_k == 1 else name_of(shape)


def name_of(shape: Shape) -> str:
    """The name of a shape in statistics and reports."""
    if isinstance(shape, str):
        return "lookup"
    if shape.top_k == 1:
        return f"chain of {levels(shape)}"
    return f"{_TREE}{shape.num_nodes} nodes, {shape.depth} levels"


def is_lookup(kind: str) -> bool:
    """Whether a proposal of this kind is a lookup, not a draft of a requested shape."""
    return kind != CHAIN and not kind.startswith(_TREE)


def levels(shape: TreeConfig) -> int:
    """Levels below the root; fewer than ``depth`` for a chain that ``num_nodes`` shortens."""
    return len(shape.links) if shape.top_k == 1 else shape.depth
