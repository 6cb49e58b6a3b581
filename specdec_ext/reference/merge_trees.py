"""Specification of ``merge_trees``: merges several draft trees of the same rows into one.

Example with 4 nodes: the first tree is 7 -> 1 -> 2, the second 7 -> 1 -> 3 and 7 -> 5 -> 6::

    node      0  1  2  3
    token     7  1  2  3      1 is shared; 5 has no room, and so 6 is left out
    parent   -1  0  1  1
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec_ext.tree.draft_tree import INACTIVE, ROOT_PARENT


def merge_trees(
    tokens: Sequence[Tensor], parents: Sequence[Tensor], nodes: int
) -> tuple[Tensor, Tensor]:
    """Arguments and outputs are those of ``specdec_ext.ops.merge_trees``."""
    batch = len(tokens[0])
    merged_tokens = tokens[0].new_zeros(batch, nodes)
    merged_parents = tokens[0].new_full((batch, nodes), INACTIVE)
    for row in range(batch):
        root = tokens[0][row, 0].item()
        if parents[0][row, 0] != ROOT_PARENT:
            continue
        merged = [(ROOT_PARENT, root)]  # parent and token of each node
        for tree_tokens, tree_parents in zip(tokens, parents, strict=True):
            if tree_parents[row, 0] != ROOT_PARENT or tree_tokens[row, 0] != root:
                continue
            places = {0: 0}  # node of the tree -> node of the result
            links = list(zip(tree_parents[row].tolist(), tree_tokens[row].tolist(), strict=True))
            for node, (parent, token) in enumerate(links[1:], start=1):
                if not 0 <= parent < node or parent not in places:
                    continue
                edge = places[parent], token
                if edge not in merged and len(merged) < nodes:
                    merged.append(edge)
                if edge in merged:
                    places[node] = merged.index(edge)
        merged_parents[row, : len(merged)] = tokens[0].new_tensor([each[0] for each in merged])
        merged_tokens[row, : len(merged)] = tokens[0].new_tensor([each[1] for each in merged])
    return merged_tokens, merged_parents
