"""``MedusaHeads``: heads that each guess one token further ahead, in the form this package computes with.

Cai et al. 2024 "Medusa". All heads read the target's last hidden state h (after the final norm) of one token.
Where the target's own head gives the next token, head i gives the one 2 + i after it::

    x_0 = h;   x_{j+1} = x_j + silu(W_ij x_j + b_ij)        for each of num_layers blocks
    logits_i = lm_head_i x
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from specdec_ext.heads.config import HeadRecord
from specdec_ext.heads.weights import DraftWeights


@dataclass(frozen=True)
class MedusaConfig:
    """Everything that decides what the heads compute.

    Attributes:
        num_heads: tokens guessed ahead.
        num_layers: residual blocks of each head.
        hidden_size: of the target.
        vocab_size: of the target.
        draft_vocab_size: rows of the heads' ``lm_head``; fewer where they guess a part of the vocabulary.
        bias: of the blocks.
        shared_lm_head: one ``lm_head`` for all heads.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    bias: bool = True
    shared_lm_head: bool = False

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of such heads."""
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                shapes[f"blocks.{head}.{layer}.weight"] = (self.hidden_size, self.hidden_size)
                if self.bias:
                    shapes[f"blocks.{head}.{layer}.bias"] = (self.hidden_size,)
        for head in range(1 if self.shared_lm_head else self.num_heads):
            shapes[f"lm_heads.{head}.weight"] = (self.draft_vocab_size, self.hidden_size)
        if self.draft_vocab_size != self.vocab_size:
            shapes["draft_to_target"] = (self.draft_vocab_size,)
        return shapes


@dataclass(frozen=True)
class MedusaHeads(DraftWeights):
    """The heads of one target.

    Attributes:
        config: what they compute.
        record: what their checkpoint told about them.
    """

    config: MedusaConfig
    source: str = "heads made in memory"
    record: HeadRecord = field(default_factory=HeadRecord)


def likely_choices(
    accuracies: Sequence[Sequence[float]], num_nodes: int
) -> tuple[tuple[int, ...], ...]:
    """The static tree of which most tokens are accepted (Cai et al. 2024, section 2.3.3).

    A node is accepted with the product of the accuracies on the way to it; the best nodes are taken greedily,
    among equals the shorter path and the better ranks.

    Args:
        accuracies: ``accuracies[i][rank]`` how often the guess of that rank of head i is right, not rising
            with the rank and at most 1.
        num_nodes: the root included, at most.

    Returns:
        ``choices`` for :class:`TreeConfig`.
    """
    for head, ranks in enumerate(accuracies):
        falling = all(a >= b for a, b in pairwise(ranks))
        if not ranks or not falling or not 0 <= ranks[-1] <= ranks[0] <= 1:
            raise ValueError(
                f"accuracies[{head}] is {list(ranks)}; expected at least one number, falling, in [0, 1]"
            )
    if not accuracies or accuracies[0][0] == 0 or num_nodes < 2:
        raise ValueError(
            f"{len(accuracies)} heads and num_nodes={num_nodes} make no tree; expected a head that is "
            "right at times, and at least the root and a node"
        )
    chosen: list[tuple[int, ...]] = []
    # (minus the probability, depth, path, probability of its parent), the best first
    candidates: list[tuple[float, int, tuple[int, ...], float]]
    candidates = [(-accuracies[0][0], 1, (0,), 1.0)]
    while candidates and len(chosen) < num_nodes - 1:
        negative, depth, path, above = heapq.heappop(candidates)
        if negative == 0:
            break
        chosen.append(path)
        ranks, rank = accuracies[depth - 1], path[-1] + 1
        if rank < len(ranks):
            heapq.heappush(candidates, (-above * ranks[rank], depth, (*path[:-1], rank), above))
        if depth < len(accuracies):
            below = negative * accuracies[depth][0]
            heapq.heappush(candidates, (below, depth + 1, (*path, 0), -negative))
    return tuple(chosen)
