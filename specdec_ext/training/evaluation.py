"""An early estimate of how long drafts will live, without generating: the head drafts along held-out texts.

At every place of a text it is known how many drafts are accepted there if the text's tokens are fed. Greedy
decoding is a walk over these places: from each to the one behind what was accepted and the token that the
target adds. Of a text that the target wrote greedily this is what decoding will do, draft for draft; of
others it is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec_ext.training.batches import Example, Features
from specdec_ext.training.objective import Objective
from specdec_ext.training.teacher import Teacher


@dataclass(frozen=True)
class Evaluation:
    """Simulated drafts, in chains of as many tokens as there are positions.

    Attributes:
        drafts: how many the greedy walk takes.
        greedy: by position, the share of these that is accepted that far.
        conditional: the same, of those that were accepted up to the position before.
        sampled: by position, the probability of being accepted that far in sampling at temperature 1, mean
            over all places.
    """

    drafts: int
    greedy: tuple[float, ...]
    conditional: tuple[float, ...]
    sampled: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step in greedy decoding, the target's own included."""
        return 1 + sum(self.greedy)

    @property
    def sampled_acceptance_length(self) -> float:
        return 1 + sum(self.sampled)


@torch.no_grad()
def evaluate(
    objective: Objective,
    features: Features,
    teacher: Teacher,
    examples: Sequence[Example],
    depth: int,
    batch_size: int = 8,
) -> Evaluation:
    """Draft chains at every place of the examples whose next tokens are in the loss mask.

    Args:
        depth: tokens of a chain; fewer if the draft weights have not as many (Medusa heads).

    Raises:
        ValueError: if there is no such place.
    """
    depth = min(depth, objective.deepest)
    walked, overlap = [], []
    # An element reads two tokens and drafts ``depth``.
    usable = [each for each in examples if len(each.tokens) >= depth + 2]
    for start in range(0, len(usable), batch_size):
        found = objective.agreement(features(usable[start : start + batch_size]), teacher, depth)
        accepted = found.matches.long().cumprod(dim=1)
        walked.append(accepted[_walk(found.places.tolist(), accepted.sum(dim=1).tolist())])
        overlap.append(found.overlap)
    if not any(map(len, walked)):
        raise ValueError(
            f"the held-out texts have no place with {depth + 1} tokens of the loss mask in a row; give "
            "longer texts, or evaluate shorter drafts"
        )
    lived = torch.cat(walked).double()
    greedy = lived.mean(dim=0)
    before = torch.cat([greedy.new_ones(1), greedy[:-1]])
    sampled = torch.cat(overlap).double().cumprod(dim=1).mean(dim=0)
    return Evaluation(
        len(lived),
        tuple(greedy.tolist()),
        tuple((greedy / before.clamp(min=1e-12)).tolist()),
        tuple(sampled.tolist()),
    )


def _walk(places: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """The elements at which greedy decoding drafts.

    Args:
        places: ascending; a gap begins another text, or another answer in it.
        accepted: drafts at each.
    """
    visited, free_from, last = [], 0, -2
    for index, (place, count) in enumerate(zip(places, accepted, strict=True)):
        if place >= free_from or place != last + 1:
            visited.append(index)
            free_from = place + count + 1
        last = place
    return visited
