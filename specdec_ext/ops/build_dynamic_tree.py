"""``build_dynamic_tree``: select the best candidates of a dynamic draft as a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library


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


@torch.library.register_fake("specdec::build_dynamic_tree")
def _build_dynamic_tree_fake(
    scores: Tensor, tokens: Tensor, parents: Tensor, root_tokens: Tensor, nodes: int
) -> tuple[Tensor, ...]:
    return tuple(parents.new_empty(len(parents), nodes) for _ in range(3))
