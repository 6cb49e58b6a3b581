"""``TreeConfig`` and ``Lookup``: the shapes in which a drafter drafts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from specdec_ext.display import Summarised
from specdec_ext.display.text import counted

# Limits of the ops on trees.
MAX_NODES = 1024
MAX_CANDIDATES = 4096


@dataclass(frozen=True)
class TreeConfig(Summarised):
    """The shape of a draft tree.

    A chain has ``top_k=1``. A dynamic tree (EAGLE-2, Li et al. 2024) expands the ``top_k`` best nodes of each
    level into ``top_k`` children each, and keeps the ``num_nodes`` best nodes of all levels. A static tree
    has the nodes listed in ``choices``.

    Attributes:
        depth: number of levels below the root.
        top_k: number of children per expanded node, and of nodes expanded per level.
        num_nodes: number of nodes kept, the root included. None keeps all nodes of a chain or static tree,
            and ``1 + depth * top_k`` nodes of a dynamic tree.
        choices: for a static tree, the path of ranks to every node: ``(0,)`` is the best child of the root,
            ``(0, 1)`` the second-best child of that node. It determines ``depth``, ``top_k`` and
            ``num_nodes``.

    Raises:
        ValueError: for a field out of its range, or a tree beyond the limits of the ops.
    """

    depth: int = 5
    top_k: int = 1
    num_nodes: int | None = None
    choices: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.choices is not None:
            choices = tuple(
                sorted({tuple(path) for path in self.choices}, key=lambda p: (len(p), p))
            )
            if not choices or any(not path or min(path) < 0 for path in choices):
                raise ValueError(
                    f"choices={self.choices!r}; expected non-empty paths of ranks, which start at 0"
                )
            known = {(), *choices}
            orphan = next((path for path in choices if path[:-1] not in known), None)
            if orphan is not None:
                raise ValueError(
                    f"choices contains the path {orphan} but not its parent {orphan[:-1]}; add that"
                )
            object.__setattr__(self, "choices", choices)
            object.__setattr__(self, "depth", max(map(len, choices)))
            object.__setattr__(self, "top_k", 1 + max(rank for path in choices for rank in path))
            object.__setattr__(self, "num_nodes", 1 + len(choices))
        for name in ("depth", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_nodes is None:
            object.__setattr__(self, "num_nodes", 1 + self.depth * self.top_k)
        elif self.num_nodes < 2:
            raise ValueError(
                f"num_nodes counts the root and must be at least 2, got {self.num_nodes}"
            )
        assert self.num_nodes is not None
        if self.num_nodes > MAX_NODES or self.num_candidates > MAX_CANDIDATES:
            raise ValueError(
                f"a tree of {self.num_nodes} nodes chosen from {self.num_candidates} candidates exceeds "
                f"{MAX_NODES} nodes and {MAX_CANDIDATES} candidates; pass a smaller depth, top_k or num_nodes"
            )

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """(parent node, rank) of nodes 1, 2, ... of a chain or static tree; () for a dynamic tree."""
        if self.choices is not None:
            number = {path: node for node, path in enumerate(((), *self.choices))}
            return tuple((number[path[:-1]], path[-1]) for path in self.choices)
        if self.top_k == 1 and self.num_nodes is not None:
            return tuple((node, 0) for node in range(min(self.depth, self.num_nodes - 1)))
        return ()

    @cached_property
    def levels(self) -> int:
        """Levels below the root; fewer than ``depth`` for a chain that ``num_nodes`` shortens."""
        return len(self.links) if self.top_k == 1 else self.depth

    @property
    def num_draft_tokens(self) -> int:
        """Number of nodes without the root."""
        assert self.num_nodes is not None  # set by __post_init__
        return min(self.num_nodes - 1, len(self.links) or self.num_candidates)

    def summary(self) -> str:
        tokens = counted(self.num_draft_tokens, "token")
        if self.top_k == 1:
            return f"chain of {tokens}"
        kind = "dynamic" if self.choices is None else "static"
        return f"{kind} tree of {tokens}, {counted(self.depth, 'level')} deep"

    def sentences(self) -> Iterable[str]:
        yield f"A {self.summary()}, without the root, which is the last committed token."
        if self.top_k == 1:
            yield "Each draft is one continuation of the text. A chain is the cheapest shape to verify."
        elif self.choices is not None:
            yield "Each draft has the same shape: the ranks listed in `choices` at each node."
        else:
            yield (
                f"In each draft the {self.top_k} best nodes of every level get {self.top_k} children each, "
                f"and the {self.num_draft_tokens} best of these {self.num_candidates} candidates are "
                "verified. More tokens are accepted than of a chain, and a pass costs more."
            )

    @property
    def num_candidates(self) -> int:
        """Number of nodes that are scored before the best are kept, without the root."""
        if self.choices is not None:
            return len(self.choices)
        return self.top_k + (self.depth - 1) * self.top_k**2


@dataclass(frozen=True)
class Lookup:
    """A draft by lookup, such as a copy of earlier text: the text decides what is proposed.

    Attributes:
        name: the name in reports. Lookups with different names have acceptance rates of their own, for
            example copies after a short and after a long match.
    """

    name: str = "lookup"


# The shape that requests a lookup.
LOOKUP = Lookup()
Shape: TypeAlias = TreeConfig | Lookup
