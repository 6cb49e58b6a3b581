"""``grow_tree``: drafts a tree level by level, for heads that are modules of PyTorch.

:mod:`specdec_ext.reference.draft_head_tree` specifies the trees for one row; here all rows grow together.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.tree.config import TreeConfig
from specdec_ext.tree.draft_tree import INACTIVE, ROOT_PARENT, DraftTree


class Guess(Protocol):
    """The best children of the nodes of a level, whose parents were guessed after in the last call."""

    def __call__(self, parents: Tensor, tokens: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and tokens, ``[rows, nodes, ranks]`` each, best first.

        Args:
            parents: ``[rows, nodes]``, for each node the number of its parent among the nodes of the last
                call. There is no last call for the root.
            tokens: ``[rows, nodes]``.
        """


def grow_tree(roots: Tensor, tree: TreeConfig, guess: Guess) -> DraftTree:
    """Draft a chain or a tree below ``roots [rows]``."""
    return _static_tree(roots, tree, guess) if tree.links else _dynamic_tree(roots, tree, guess)


def _static_tree(roots: Tensor, tree: TreeConfig, guess: Guess) -> DraftTree:
    """The same tree in every row; ranks beyond the guesses are left out."""
    rows, device = len(roots), roots.device
    inner = {parent for parent, _ in tree.links}
    parents, tokens = [ROOT_PARENT], [roots[:, None]]
    level, nodes, above = (
        [0],
        tokens[0],
        [0],
    )  # inner nodes of a level, and the places of their parents
    while level:
        index = torch.tensor(above, device=device).expand(rows, -1)
        _, guesses = guess(index, nodes)
        places = {node: place for place, node in enumerate(level)}
        links = [link for link in tree.links if link[0] in places]
        first = len(parents)
        known = [rank < guesses.shape[2] and parents[parent] != INACTIVE for parent, rank in links]
        parents += [
            link[0] if knows else INACTIVE for link, knows in zip(links, known, strict=True)
        ]
        picked = [
            (places[link[0]], link[1] if knows else 0)
            for link, knows in zip(links, known, strict=True)
        ]
        above_them, ranks = torch.tensor(picked, device=device).unbind(dim=1)
        tokens.append(guesses[:, above_them, ranks])
        chosen = [i for i in range(len(links)) if first + i in inner]
        level = [first + i for i in chosen]
        above = [picked[i][0] for i in chosen]
        nodes = tokens[-1] if len(chosen) == len(links) else tokens[-1][:, chosen]
    return DraftTree(
        torch.cat(tokens, dim=1), torch.tensor(parents, device=device).expand(rows, -1)
    )


def _dynamic_tree(roots: Tensor, tree: TreeConfig, guess: Guess) -> DraftTree:
    """A tree for each row, of the nodes with the largest products of probabilities (EAGLE-2)."""
    log_probs, guesses = guess(torch.zeros_like(roots)[:, None], roots[:, None])
    ranks = log_probs.shape[2]
    scores, tokens = [log_probs[:, 0]], [guesses[:, 0]]
    parents = [torch.full_like(tokens[0], ROOT_PARENT)]
    first = 0  # number of the previous level's first candidate
    for _ in range(1, tree.depth):
        order = scores[-1].sort(dim=1, descending=True, stable=True).indices
        frontier = order[:, : tree.top_k]
        above = scores[-1].gather(1, frontier)
        log_probs, guesses = guess(frontier // ranks, tokens[-1].gather(1, frontier))
        parents.append((first + frontier).repeat_interleave(ranks, dim=1))
        first += scores[-1].shape[1]
        scores.append((above[:, :, None] + log_probs).flatten(1))
        tokens.append(guesses.flatten(1))
    assert tree.num_nodes is not None
    drafted = ops.build_dynamic_tree(
        torch.cat(scores, dim=1),
        torch.cat(tokens, dim=1),
        torch.cat(parents, dim=1),
        roots,
        tree.num_nodes,
    )
    return DraftTree(drafted.tokens, drafted.parents)
