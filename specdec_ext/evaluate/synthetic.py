"""``SyntheticDrafter``: drafts that are right as often as asked for, at the cost of a real drafter.

What speculation costs on a target can be measured before anybody trained a head for it, if acceptance is
prescribed. Numbers made with it say nothing about any drafter's quality and must be labelled "synthetic
acceptance".
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
from specdec_ext.tree.config import FOUND, Shape
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

GOLDEN = 0.6180339887498949


class SyntheticDrafter(Drafter):
    """Lets another drafter draft chains, then replaces its tokens by right and wrong ones.

    Position i of a chain is right with probability ``acceptance[i]`` if everything before it is, and wrong
    otherwise: the conditional acceptance that :class:`SpeculationStats` counts. How far a chain is right is
    drawn from a sequence of low discrepancy (multiples of the golden ratio), so that even a short text comes
    close to what was prescribed. The draws belong to (seed, prompt): a call can be repeated.

    Args:
        drafter: whose drafts cost what drafts cost; proposes chains, such as a head with random weights.
        answers: by row, all tokens that plain decoding of this call emits, of the same seed when sampling.
        acceptance: conditional, of positions 1, 2, ...; a longer chain is wrong behind them.
        vocab_size: of the target, for wrong tokens.
        seed: of the draws.

    Raises:
        ValueError: for probabilities outside [0, 1], or less than two tokens to choose from.
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
            raise ValueError(f"acceptance={list(acceptance)} must be probabilities, in [0, 1]")
        if vocab_size < 2:
            raise ValueError(f"vocab_size={vocab_size} leaves no wrong token; expected at least 2")
        self.drafter, self.answers, self.acceptance = drafter, answers, acceptance
        # Probabilities that the first position is right, the first two are, ...
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
        """The chains among the drafter's."""
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
                    f"{type(self.drafter).__name__} proposed a tree; acceptance by position is of chains: "
                    "give it tree=TreeConfig(depth=...)"
                )
            tokens[i][1:] = self._chain(row, len(context.generated[row]), len(tokens[i]) - 1)
        return DraftTree(tree.tokens.new_tensor(tokens), tree.parents)

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        self.drafter.commit(context, accepted, output)

    def _chain(self, row: int, done: int, length: int) -> list[int]:
        """``length`` tokens behind the ``done`` that row has emitted; behind the answer's end token 0."""
        answer = list(self.answers[row][done : done + length])
        draw = self._draws[row]
        self._draws[row] = (draw + GOLDEN) % 1
        right = sum(draw < reached for reached in self._reached[:length])
        wrong = [(token + 1) % self._vocab_size for token in answer[right:]]
        return answer[:right] + wrong + [0] * (length - len(answer))


def _is_chain(shape: Shape) -> bool:
    return shape == FOUND or (shape.top_k == 1 and shape.choices is None)


def constant_acceptance(mean_acceptance_length: float, depth: int) -> list[float]:
    """The conditional acceptance, the same at all ``depth`` positions, of chains of this mean length.

    The mean acceptance length of chains is ``1 + a + a^2 + ... + a^depth``, the bonus token included.

    Raises:
        ValueError: if no probability gives that length.
    """
    if not 1 <= mean_acceptance_length <= depth + 1:
        raise ValueError(
            f"chains of {depth} have a mean acceptance length from 1 to {depth + 1}, never "
            f"{mean_acceptance_length}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(depth + 1)) < mean_acceptance_length:
            low = middle
        else:
            high = middle
    return [high] * depth
