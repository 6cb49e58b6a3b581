"""``tree_mask`` and ``build_dynamic_tree``: ops on the structure of draft trees."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library


class TreeMask(NamedTuple):
    """The structure of a batch of draft trees.

    Attributes:
        ancestors: ``[batch, nodes, ceil(nodes / 64)]``; bit ``m % 64`` of word ``m // 64`` is set if and only
            if node m is the node itself or one of its ancestors. 0 for an inactive node.
        depths: ``[batch, nodes]``; 0 for the root, -1 for an inactive node.
        positions: ``[batch, nodes]``; root position + depth. An inactive node has its row's root
            position, which is always a valid index.
        first_child: ``[batch, nodes]``; -1 if none.
        next_sibling: ``[batch, nodes]``; siblings in ascending node order, -1 after the last.
        paths: ``[batch, nodes, nodes]``; ``paths[b, n, d]`` is the ancestor of n at depth d, n itself
            at its own depth, -1 beyond and for inactive nodes.
    """

    ancestors: Tensor
    depths: Tensor
    positions: Tensor
    first_child: Tensor
    next_sibling: Tensor
    paths: Tensor


class DynamicTree(NamedTuple):
    """Trees selected from candidates. Nodes after the root are in ascending order of candidate numbers.

    Attributes:
        tokens: ``[batch, nodes]``; 0 where a node is absent.
        parents: ``[batch, nodes]``; -1 for node 0, -2 where a node is absent.
        selected: ``[batch, nodes]``; the candidate of each node; -1 for node 0 and absent nodes.
    """

    tokens: Tensor
    parents: Tensor
    selected: Tensor


def build_dynamic_tree(
    scores: Tensor, tokens: Tensor, parents: Tensor, root_tokens: Tensor, nodes: int
) -> DynamicTree:
    """Select the best candidates of a dynamic draft (EAGLE-2) as a tree.

    The effective score of a candidate is the lowest score on its path from the root. That is its own score,
    unless a caller gives a child a better score than its parent. The ``nodes - 1`` best candidates are
    selected in the order (effective score descending, index ascending). In this order parents precede their
    children, so every selection is a tree. With fewer eligible candidates, the last nodes are absent.

    Args:
        scores: ``[batch, candidates]`` float32, cumulative log-probabilities, up to 4096 per row. Candidates
            with NaN or -inf are not eligible, and neither are their descendants.
        tokens: ``[batch, candidates]`` int64.
        parents: ``[batch, candidates]`` int64; the number of the candidate's parent, which must be smaller,
            or -1 for the root. With any other value, such as -2, the candidate is not eligible.
        root_tokens: ``[batch]`` int64; the last committed token, or -1 for an inactive row.
        nodes: number of nodes of the tree, the root included.
    """
    return DynamicTree(
        *_library.native.build_dynamic_tree(scores, tokens, parents, root_tokens, nodes)
    )


def tree_mask(parents: Tensor, root_positions: Tensor) -> TreeMask:
    """Compute masks, depths, positions, child links and paths from the parents of draft trees.

    Args:
        parents: ``[batch, nodes]`` int64.
        root_positions: ``[batch]`` int64; the position of node 0 of each row.
    """
    return TreeMask(*_library.native.tree_mask(parents, root_positions))


@torch.library.register_fake("specdec::tree_mask")
def _tree_mask_fake(parents: Tensor, root_positions: Tensor) -> tuple[Tensor, ...]:
    batch, nodes = parents.shape
    like_nodes = [parents.new_empty(batch, nodes) for _ in range(4)]
    ancestors = parents.new_empty(batch, nodes, (nodes + 63) // 64)
    return ancestors, *like_nodes, parents.new_empty(batch, nodes, nodes)


@torch.library.register_fake("specdec::build_dynamic_tree")
def _build_dynamic_tree_fake(
    scores: Tensor, tokens: Tensor, parents: Tensor, root_tokens: Tensor, nodes: int
) -> tuple[Tensor, ...]:
    return tuple(parents.new_empty(len(parents), nodes) for _ in range(3))
