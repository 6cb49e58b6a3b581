"""``MedusaHeads``: Medusa heads (Cai et al. 2024) in the canonical form of this package.

All heads read the target's last hidden state h (after the final norm) of one token. The target's own head
predicts the next token; head i predicts the token 2 + i positions after the one it reads::

    x_0 = h;   x_{j+1} = x_j + silu(W_ij x_j + b_ij)        for each of num_layers blocks
    logits_i = lm_head_i x
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specdec_ext.heads.weights import DraftWeights


@dataclass(frozen=True)
class MedusaConfig:
    """Everything that determines the computation of the heads.

    Attributes:
        num_heads: number of heads, and so of tokens that are drafted ahead.
        num_layers: number of residual blocks in each head.
        hidden_size: hidden size of the target.
        vocab_size: vocabulary size of the target.
        draft_vocab_size: rows of the heads' ``lm_head``; fewer than ``vocab_size`` if the heads draft only a
            part of the vocabulary.
        bias: whether the blocks have a bias.
        shared_lm_head: whether all heads share one ``lm_head``.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    bias: bool = True
    shared_lm_head: bool = False

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of heads with this config; they have no others."""
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


@dataclass(frozen=True, repr=False)
class MedusaHeads(DraftWeights):
    """Config and tensors of the Medusa heads of one target.

    Attributes:
        config: determines the computation.
        tensors, source, record: see :class:`DraftWeights`.
    """

    config: MedusaConfig
    source: str = "heads made in memory"

    @property
    def _kind(self) -> str:
        return f"{self.config.num_heads} Medusa heads"

    def _facts(self) -> Iterable[tuple[str, str]]:
        yield "keys and values", "none"
        yield "hidden states read", "the last one"


def likely_choices(
    accuracies: Sequence[Sequence[float]], num_nodes: int
) -> tuple[tuple[int, ...], ...]:
    """Find the static tree with the largest expected number of accepted tokens (Cai et al. 2024, 2.3.3).

    The acceptance probability of a node is the product of the accuracies on its path. The nodes with the
    highest probability are chosen; among equal ones those with the shorter path, then with the better ranks.

    Args:
        accuracies: ``accuracies[i][rank]`` is the probability that the candidate of this rank of head i is
            correct; it must not rise with the rank.
        num_nodes: the largest number of nodes, root included.

    Returns:
        ``choices`` for :class:`TreeConfig`.

    Raises:
        ValueError: for accuracies that rise or lie outside [0, 1], or from which no tree can be made.
    """
    for head, ranks in enumerate(accuracies):
        falling = all(a >= b for a, b in pairwise(ranks))
        if not ranks or not falling or not 0 <= ranks[-1] <= ranks[0] <= 1:
            raise ValueError(
                f"accuracies[{head}] is {list(ranks)}; expected at least one number in [0, 1], and none "
                "larger than the one before"
            )
    if not accuracies or accuracies[0][0] == 0 or num_nodes < 2:
        raise ValueError(
            f"no tree can be made from {len(accuracies)} heads and num_nodes={num_nodes}; expected at least "
            "one head, accuracies[0][0] > 0 and num_nodes >= 2 (the root and one more)"
        )
    chosen: list[tuple[int, ...]] = []
    # (minus the probability, depth, path, probability of the parent), the most probable first
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
