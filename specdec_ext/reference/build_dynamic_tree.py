"""Specification of ``build_dynamic_tree``: selects the best candidates of a dynamic draft as a tree.

This is the selection of EAGLE-2 (Li et al. 2024, section 4.2), in an order that always gives a tree, even
with ties: effective score descending, candidate index ascending. The effective score of a candidate is the
lowest score on its path from the root. So a parent's effective score is at least that of its child, and its
index is smaller; parents precede their children, and every prefix of the order contains all ancestors of its
members.
Example with 4 nodes::

    candidate    0     1     2     3     4
    parents     -1    -1     0     0     1
    scores    -0.5  -0.9  -0.5  -3.0  -0.1
    effective -0.5  -0.9  -0.5  -3.0  -0.9    (4 has a better score than its parent, by mistake)
    selected     0     1     2                (order 0, 2, 1, 4, 3)

    node         0     1     2     3
    parents     -1     0     0     1
"""

from __future__ import annotations

import math

from torch import Tensor

from specdec_ext.tree.draft_tree import INACTIVE, ROOT_PARENT


def build_dynamic_tree(
    scores: Tensor, tokens: Tensor, parents: Tensor, root_tokens: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and outputs are those of ``specdec_ext.ops.build_dynamic_tree``."""
    batch = len(scores)
    tree_tokens = parents.new_zeros(batch, nodes)
    tree_parents = parents.new_full((batch, nodes), INACTIVE)
    selected = parents.new_full((batch, nodes), -1)
    for row in range(batch):
        if root_tokens[row] < 0:
            continue
        row_parents = parents[row].tolist()
        effective = _effective_scores(scores[row].tolist(), row_parents)
        order = sorted(effective, key=lambda candidate: (-effective[candidate], candidate))
        chosen = sorted(order[: nodes - 1])
        number = {candidate: node for node, candidate in enumerate(chosen, start=1)}
        tree_tokens[row, 0], tree_parents[row, 0] = root_tokens[row], ROOT_PARENT
        for candidate, node in number.items():
            parent = row_parents[candidate]
            tree_tokens[row, node] = tokens[row, candidate]
            tree_parents[row, node] = 0 if parent == ROOT_PARENT else number[parent]
            selected[row, node] = candidate
    return tree_tokens, tree_parents, selected


def _effective_scores(scores: list[float], parents: list[int]) -> dict[int, float]:
    """Eligible candidate -> the lowest score on its path."""
    effective: dict[int, float] = {}
    for candidate, (score, parent) in enumerate(zip(scores, parents, strict=True)):
        above = math.inf if parent == ROOT_PARENT else effective.get(parent)
        if above is not None and score > -math.inf:  # false for NaN
            effective[candidate] = min(score, above)
    return effective
