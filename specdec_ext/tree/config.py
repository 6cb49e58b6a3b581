"""``TreeConfig``: the shape that a drafter is asked to give its trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

# What the ops on trees take.
MAX_NODES = 1024
MAX_CANDIDATES = 4096
# Beside a ``TreeConfig`` a drafter may be asked for what it finds: copies, or whatever it proposes by itself.
FOUND: Literal["found"] = "found"


@dataclass(frozen=True)
class TreeConfig:
    """The shape that a drafter is to give its trees.

    A chain has ``top_k=1``. A dynamic tree (EAGLE-2, Li et al. 2024) expands, level by level, the ``top_k``
    best nodes by ``top_k`` children each and keeps the ``num_nodes`` best of all. A static tree has the
    nodes that ``choices`` lists.

    Attributes:
        depth: levels below the root.
        top_k: children per expanded node, and nodes expanded per level.
        num_nodes: nodes kept, the root included; None keeps a chain's or a static tree's nodes, and of a
            dynamic tree as many as it has levels times children, root included.
        choices: of a static tree, for every node the ranks that lead to it: ``(0,)`` is the best child of
            the root, ``(0, 1)`` the second best child of that. Gives ``depth`` and ``top_k`` by itself.
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
                    f"choices={self.choices!r}; expected non-empty paths of ranks that start at 0"
                )
            known = {(), *choices}
            orphan = next((path for path in choices if path[:-1] not in known), None)
            if orphan is not None:
                raise ValueError(f"choices has the path {orphan} without its parent {orphan[:-1]}")
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
        """Of a chain or static tree, (parent node, rank) of nodes 1, 2, ...; of a dynamic tree nothing."""
        if self.choices is not None:
            number = {path: node for node, path in enumerate(((), *self.choices))}
            return tuple((number[path[:-1]], path[-1]) for path in self.choices)
        if self.top_k == 1 and self.num_nodes is not None:
            return tuple((node, 0) for node in range(min(self.depth, self.num_nodes - 1)))
        return ()

    @property
    def num_candidates(self) -> int:
        """Nodes that are scored before the best are kept, the root not counted."""
        if self.choices is not None:
            return len(self.choices)
        return self.top_k + (self.depth - 1) * self.top_k**2


Shape: TypeAlias = TreeConfig | Literal["found"]
