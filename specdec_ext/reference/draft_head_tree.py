"""The nodes that ``draft_head`` drafts, level by level: those of a static tree, or the best ones.

A *level* is the set of nodes whose children are drafted next. The score of a node is its parent's score plus
its own log-probability over the draft vocabulary. Nodes with score NaN or -inf are absent, with all their
descendants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec_ext.reference.build_dynamic_tree import build_dynamic_tree
from specdec_ext.tree.config import TreeConfig
from specdec_ext.tree.draft_tree import INACTIVE, ROOT_PARENT


@dataclass
class Level:
    """Nodes of one depth that have run.

    Attributes:
        log_probs: ``[n, draft_vocab]``, log-probabilities of their children.
        feedback: ``[n, hidden]``.
        seen: ``[n, slots]`` bool: the committed slots, those of a node's ancestors and its own.
    """

    log_probs: Tensor
    feedback: Tensor
    seen: Tensor


class Draft(Protocol):
    """The draft of a row in progress."""

    def run(self, level: Level, parents: Sequence[int], tokens: Tensor) -> Level:
        """Run the next level, whose node i has token ``tokens[i]`` and parent ``parents[i]`` in ``level``."""

    def target_ids(self, ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary to ids of the target."""


Tree = tuple[Tensor, Tensor, Tensor]


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the best scores along the last axis, in the order (score descending, index ascending)."""
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def static_tree(draft: Draft, level: Level, root: int, links: Sequence[tuple[int, int]]) -> Tree:
    """Draft node ``1 + i`` with ``links[i]``: (parent node, rank among the parent's children).

    Returns:
        ``(tokens, parents, scores)``, each ``[1 + len(links)]``.
    """
    nodes = 1 + len(links)
    device = level.log_probs.device
    tokens = torch.zeros(nodes, dtype=torch.long, device=device)
    parents = torch.full((nodes,), INACTIVE, device=device)
    scores = level.log_probs.new_full((nodes,), -torch.inf)
    tokens[0], parents[0], scores[0] = root, ROOT_PARENT, 0
    inner = {parent for parent, _ in links}
    members = {0: 0}  # node -> its index in level
    while members:
        ranked = best(level.log_probs, 1 + max(rank for _, rank in links))
        children = []
        for node, (parent, rank) in enumerate(links, start=1):
            if parent not in members or rank >= ranked.shape[1]:
                continue
            token = ranked[members[parent], rank]
            score = scores[parent] + level.log_probs[members[parent], token]
            if score > -torch.inf:  # false for NaN
                tokens[node], parents[node], scores[node] = draft.target_ids(token), parent, score
                children.append(node)
        children = [node for node in children if node in inner]
        if children:
            places = [members[int(parents[node])] for node in children]
            level = draft.run(level, places, tokens[children])
        members = {node: place for place, node in enumerate(children)}
    return tokens, parents, scores


def dynamic_tree(draft: Draft, level: Level, root: int, tree: TreeConfig) -> Tree:
    """EAGLE-2 (Li et al. 2024, section 4): expand the ``top_k`` best nodes of each level, and keep the best.

    Returns:
        ``(tokens, parents, scores)``, each ``[tree.num_nodes]``.
    """
    assert tree.num_nodes is not None
    tokens, parents, scores = [], [], []
    frontier = level.log_probs.new_tensor(
        [ROOT_PARENT]
    ).long()  # candidate numbers of the nodes in level
    frontier_scores = level.log_probs.new_zeros(1)
    candidates = 0
    for depth in range(tree.depth):
        ids = best(level.log_probs, tree.top_k)
        new_scores = (frontier_scores[:, None] + level.log_probs.gather(1, ids)).flatten()
        new_tokens = draft.target_ids(ids.flatten())
        tokens.append(new_tokens)
        parents.append(frontier.repeat_interleave(ids.shape[1]))
        scores.append(new_scores)
        chosen = best(new_scores, tree.top_k)
        chosen = chosen[new_scores[chosen] > -torch.inf]
        if len(chosen) == 0 or depth + 1 == tree.depth:
            break
        places = (chosen // ids.shape[1]).tolist()
        level = draft.run(level, places, new_tokens[chosen])
        frontier, frontier_scores = candidates + chosen, new_scores[chosen]
        candidates += len(new_scores)
    all_scores = torch.cat(scores)
    drafted_tokens, drafted_parents, selected = build_dynamic_tree(
        all_scores[None],
        torch.cat(tokens)[None],
        torch.cat(parents)[None],
        frontier.new_tensor([root]),
        tree.num_nodes,
    )
    drafted_scores = torch.where(selected[0] >= 0, all_scores[selected[0]], -torch.inf)
    drafted_scores[0] = 0
    return drafted_tokens[0], drafted_parents[0], drafted_scores
