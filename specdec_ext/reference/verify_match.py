"""Specification of ``verify_match``: rule 1, "match".

At each visited node, starting at the root, exactly one token is drawn from the processed target distribution:
``argmax(logit + g)``, with the noise g of :mod:`specdec_ext.reference.rng` and ties going to the lowest
token. If a child has this token, the walk continues at the first such child; otherwise the token is emitted
and the walk ends. The emitted tokens have the target's distribution for every tree, because no draw depends
on the tree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec_ext.reference.rng import gumbel_noise
from specdec_ext.tree.draft_tree import ROOT_PARENT

OK, NAN, NO_FINITE_LOGIT = 0, 1, 2


def walk(
    tokens: list[int], parents: list[int], pick: Callable[[int, int], int]
) -> tuple[list[int], int]:
    """Walk a tree; returns the visited nodes and the token that ended the walk.

    Args:
        tokens: token of each node.
        parents: parent of each node.
        pick: ``pick(node, depth)`` draws the token of a visited node; it may raise to end the walk.
    """
    path = [0]
    while True:
        token = pick(path[-1], len(path) - 1)
        for child in range(path[-1] + 1, len(tokens)):
            if parents[child] == path[-1] and tokens[child] == token:
                path.append(child)
                break
        else:
            return path, token


class BadLogits(Exception):
    """The logits of a visited node contain NaN or are all -inf; ``status`` says which."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def check_logits(logits: Tensor) -> None:
    """Raise :class:`BadLogits` if no token can be drawn with these ``logits [vocab]``."""
    if logits.isnan().any():
        raise BadLogits(NAN)
    if logits.max() == -torch.inf:
        raise BadLogits(NO_FINITE_LOGIT)


def verify_match(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
    stochastic: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments and outputs are those of ``specdec_ext.ops.verify_match``."""
    batch, nodes, vocab = logits.shape
    path = parents.new_full((batch, nodes), -1)
    num_accepted, next_token = parents.new_full((batch,), -1), parents.new_full((batch,), -1)
    status = parents.new_zeros(batch)
    for row in range(batch):
        if parents[row, 0] != ROOT_PARENT:
            continue
        visited: list[int] = []

        def pick(node: int, depth: int, row: int = row, visited: list[int] = visited) -> int:
            scores = logits[row, node].float()
            check_logits(scores)
            visited.append(node)
            if stochastic[row]:
                position = root_positions[row] + depth + 1
                scores = scores + gumbel_noise(seeds[row], row_ids[row], position, vocab)
            return int((scores == scores.max()).nonzero()[0])

        try:
            _, next_token[row] = walk(tokens[row].tolist(), parents[row].tolist(), pick)
        except BadLogits as error:
            status[row] = error.status
        num_accepted[row] = len(visited) - 1
        path[row, : len(visited)] = path.new_tensor(visited)
    return path, num_accepted, next_token, status
