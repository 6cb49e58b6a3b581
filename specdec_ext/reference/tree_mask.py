"""Specification of ``tree_mask``: masks, depths, positions, child links and paths of draft trees.

Example: nodes 1 and 2 are children of the root, 3 and 4 of node 1::

    node          0   1   2   3   4
    parents      -1   0   0   1   1
    depths        0   1   1   2   2
    ancestors     1  11 101 1011 10011      (bits, node 0 on the right)
    first_child   1   3  -1  -1  -1
    next_sibling -1   2  -1   4  -1
    paths[3]      0   1   3  -1  -1
"""

from __future__ import annotations

from torch import Tensor

from specdec_ext.tree.draft_tree import ROOT_PARENT


def tree_mask(parents: Tensor, root_positions: Tensor) -> tuple[Tensor, ...]:
    """Arguments and outputs are those of ``specdec_ext.ops.tree_mask``."""
    batch, nodes = parents.shape
    ancestors = parents.new_zeros(batch, nodes, (nodes + 63) // 64)
    depths = parents.new_full((batch, nodes), -1)
    positions = root_positions[:, None].repeat(1, nodes)
    first_child, next_sibling = depths.clone(), depths.clone()
    paths = parents.new_full((batch, nodes, nodes), -1)
    for row, row_parents in enumerate(parents.tolist()):
        last_child: dict[int, int] = {}
        row_paths: dict[int, list[int]] = {}
        for node, parent in enumerate(row_parents):
            if node == 0 and parent == ROOT_PARENT:
                row_paths[0] = [0]
            elif node > 0 and parent in row_paths:
                row_paths[node] = [*row_paths[parent], node]
                if parent in last_child:
                    next_sibling[row, last_child[parent]] = node
                else:
                    first_child[row, parent] = node
                last_child[parent] = node
        for node, path in row_paths.items():
            depths[row, node] = len(path) - 1
            positions[row, node] += len(path) - 1
            paths[row, node, : len(path)] = paths.new_tensor(path)
            for ancestor in path:
                ancestors[row, node, ancestor // 64] |= _bit(ancestor % 64)
    return ancestors, depths, positions, first_child, next_sibling, paths


def _bit(index: int) -> int:
    """2^index as a signed 64-bit word."""
    return 1 << index if index < 63 else -(1 << 63)
