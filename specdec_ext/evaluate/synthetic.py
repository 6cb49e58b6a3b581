"""``SyntheticDrafter``: drafts with a prescribed acceptance, at the cost of a real drafter.

With prescribed acceptance the speed of speculation on a target can be measured before a head is trained for
it. Such numbers say nothing about the quality of a drafter and must be labelled "synthetic acceptance".
"""

from __future__ import annotations

import operator
import random
from collections.abc import Hashable, Sequence
from itertools import accumulate

from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.models import TargetOutput
from specdec_ext.tree.config import Lookup, Shape
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

GOLDEN = 0.6180339887498949


class SyntheticDrafter(Drafter):
    """Lets another drafter draft chains, then replaces their tokens by right and wrong ones.

    Position i of a chain is right with probability ``acceptance[i]`` if all positions before it are right,
    and wrong otherwise; this is the conditional acceptance that :class:`SpeculationStats` counts. The number
    of right tokens is drawn from a low-discrepancy sequence (multiples of the golden ratio), so that even a
    short text comes close to the prescribed acceptance. The draws depend on seed, row and prompt only, so a
    call can be repeated.

    Args:
        drafter: the drafter whose cost is measured; proposes chains. It may be a head with random weights.
        answers: for each row, all tokens that plain decoding emits in this call (with the same seed).
        acceptance: conditional acceptance of positions 1, 2, ...; all later positions are wrong.
        vocab_size: size of the target's vocabulary, from which wrong tokens are taken.
        seed: seed of the draws.

    Raises:
        ValueError: for probabilities outside [0, 1] or a vocabulary of less than two tokens.
    """

    def __init__(
        self,
        drafter: Drafter,
        answers: Sequence[Sequence[int]],
        acceptance: Sequence[float],
        vocab_size: int,
        seed: int = 0,
    ):
        if not all(0 <= share <= 1 for share in acceptance):
            raise ValueError(f"acceptance={list(acceptance)}; expected probabilities in [0, 1]")
        if vocab_size < 2:
            raise ValueError(f"vocab_size={vocab_size} has no wrong token; expected at least 2")
        self.drafter, self.answers, self.acceptance = drafter, answers, acceptance
        # Probabilities that the first 1, 2, ... positions are right.
        self._reached = list(accumulate(acceptance, operator.mul))
        self._vocab_size, self._seed = vocab_size, seed

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return self.drafter.feature_layers(model)

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        self.drafter.start(context, model, output)
        self._draws = [
            random.Random(f"{self._seed} {row} {context.prompt(row)}").random()
            for row in context.rows
        ]

    def shapes(self, context: Context) -> Sequence[Shape]:
        """The drafter's shapes that are chains."""
        return [shape for shape in self.drafter.shapes(context) if _is_chain(shape)]

    @property
    def identity(self) -> Hashable:
        return super().identity, self.drafter.identity, tuple(self.acceptance)

    def propose(self, context: Context) -> DraftTree:
        tree = self.drafter.propose(context)
        tokens = tree.tokens.tolist()
        for i, row in enumerate(context.rows):
            if tree.parents[i].tolist() != list(range(-1, len(tokens[i]) - 1)):
                raise ValueError(
                    f"{type(self.drafter).__name__} proposed a tree, but synthetic acceptance is defined for "
                    "chains: construct it with tree=TreeConfig(depth=...)"
                )
            tokens[i][1:] = self._chain(row, len(context.generated[row]), len(tokens[i]) - 1)
        return DraftTree(tree.tokens.new_tensor(tokens), tree.parents)

    def rest(self, resting: bool) -> None:
        self.drafter.rest(resting)

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        self.drafter.commit(context, accepted, output)

    def _chain(self, row: int, done: int, length: int) -> list[int]:
        """``length`` draft tokens after the ``done`` emitted ones; 0 after the end of the answer."""
        answer = list(self.answers[row][done : done + length])
        draw = self._draws[row]
        self._draws[row] = (draw + GOLDEN) % 1
        right = sum(draw < reached for reached in self._reached[:length])
        wrong = [(token + 1) % self._vocab_size for token in answer[right:]]
        return answer[:right] + wrong + [0] * (length - len(answer))


def _is_chain(shape: Shape) -> bool:
    return isinstance(shape, Lookup) or (shape.top_k == 1 and shape.choices is None)


def constant_acceptance(mean_acceptance_length: float, depth: int) -> list[float]:
    """Conditional acceptance ``a``, equal at all ``depth`` positions, that gives a mean acceptance length.

    The mean acceptance length of chains is ``1 + a + a^2 + ... + a^depth``, bonus token included.

    Raises:
        ValueError: if no probability gives that length.
    """
    if not 1 <= mean_acceptance_length <= depth + 1:
        raise ValueError(
            f"mean_acceptance_length={mean_acceptance_length}; expected 1 to {depth + 1} for chains of "
            f"{depth} tokens"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(depth + 1)) < mean_acceptance_length:
            low = middle
        else:
            high = middle
    return [high] * depth
