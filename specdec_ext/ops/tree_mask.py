"""``tree_mask``: masks, depths, positions, child links and paths of draft trees."""

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
