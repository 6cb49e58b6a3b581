"""``merge_trees``: merge several draft trees of the same rows into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library


class MergedTrees(NamedTuple):
    """One tree per row, without duplicate siblings.

    Attributes:
        tokens: ``[batch, nodes]``; 0 where a node is absent.
        parents: ``[batch, nodes]``; -1 for node 0, -2 where a node is absent, which are the last ones.
    """

    tokens: Tensor
    parents: Tensor


def merge_trees(tokens: Sequence[Tensor], parents: Sequence[Tensor], nodes: int) -> MergedTrees:
    """Merge several draft trees of the same rows into one. Paths with a common prefix share its nodes.

    The nodes of all trees are visited in order, those of the first tree first. A node that no earlier one
    equals becomes the next node of the result. When all ``nodes`` are used, further ones are left out.

    A row is inactive if it is inactive in the first tree. Other trees may be inactive there.

    Args:
        tokens: ``[batch, nodes of the tree]`` int64, for each of 1 to 8 trees. Active rows have the same
            token at all roots; on the CPU anything else is an error, on CUDA such a tree is left out.
        parents: ``[batch, nodes of the tree]`` int64, for each tree.
        nodes: number of nodes of the result, the root included.
    """
    return MergedTrees(*_library.native.merge_trees(list(tokens), list(parents), nodes))


@torch.library.register_fake("specdec::merge_trees")
def _merge_trees_fake(
    tokens: list[Tensor], parents: list[Tensor], nodes: int
) -> tuple[Tensor, Tensor]:
    shape = len(tokens[0]), nodes
    return tokens[0].new_empty(shape), tokens[0].new_empty(shape)
