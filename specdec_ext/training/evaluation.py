"""An early estimate of how long drafts will live, without generating: the head drafts along held-out texts.

At every place of a text it is known how many drafts are accepted there if the text's tokens are fed. Decoding
is a walk over these places: from each to the one behind what was accepted and the token that the target adds.
Of a text that the target wrote this is what decoding will do, draft for draft: of one that it wrote greedily
in greedy decoding; of one that it drew in sampling at that temperature, where ``verification="match"``
accepts a draft that is the token drawn. Of other texts it is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.training.batches import Example, Features
from specdec_ext.training.objective import Objective
from specdec_ext.training.regenerate import regenerate
from specdec_ext.training.teacher import Teacher

# Texts that are sampled for an estimate, and tokens of each at most: a few thousand drafts.
_SAMPLED_TEXTS, _SAMPLED_TOKENS = 32, 128


@dataclass(frozen=True)
class HeldOut:
    """Texts that a head is judged on, none of which it learns from.

    Attributes:
        texts: of what it learns; estimates of greedy decoding.
        sampled: continuations that the target drew, :func:`sampled_texts`; estimates of sampling.
        old: of what the head was made for before it was adapted; what it forgets.
        features: of the sampled texts, which a dump does not have; None for those of the others.
    """

    texts: Sequence[Example] = ()
    sampled: Sequence[Example] = ()
    old: Sequence[Example] = ()
    features: Features | None = None


@dataclass(frozen=True)
class Evaluation:
    """Simulated drafts, in chains of as many tokens as there are positions.

    Attributes:
        drafts: how many the greedy walk takes.
        greedy: by position, the share of these that is accepted that far.
        conditional: the same, of those that were accepted up to the position before.
        sampled: by position, the share that is accepted that far in sampling; empty without sampled texts.
    """

    drafts: int
    greedy: tuple[float, ...]
    conditional: tuple[float, ...]
    sampled: tuple[float, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step in greedy decoding, the target's own included."""
        return 1 + sum(self.greedy)

    @property
    def sampled_acceptance_length(self) -> float:
        """The same in sampling; NaN without sampled texts."""
        return 1 + sum(self.sampled) if self.sampled else math.nan


def sampled_texts(
    model: PreTrainedModel, texts: Sequence[Example], cache_file: Path, seed: int = 0
) -> list[Example]:
    """What the target draws at temperature 1 behind the beginnings of some texts.

    Args:
        model: the target.
        texts: at most 32 of them, evenly spread, are continued: behind what is before the first token of
            their loss mask, or behind their first quarter.
        cache_file: where the continuations are kept, as ``regenerate`` keeps them.
        seed: of the sampling.
    """
    longest = max(len(each.tokens) for each in texts)
    new_tokens = max(1, min(_SAMPLED_TOKENS, longest // 2))
    room = max(1, longest - new_tokens)
    chosen = texts[:: math.ceil(len(texts) / _SAMPLED_TEXTS)]
    prompts = [each.tokens[: min(_beginning(each), room)] for each in chosen]
    return regenerate(
        model,
        prompts,
        cache_file,
        max_new_tokens=new_tokens,
        max_length=room + new_tokens,
        temperature=1.0,
        seed=seed,
    )


def _beginning(text: Example) -> int:
    return int(text.loss_mask.int().argmax()) or max(1, len(text.tokens) // 4)


@torch.no_grad()
def evaluate(
    objective: Objective,
    features: Features,
    teacher: Teacher,
    examples: Sequence[Example],
    depth: int,
    batch_size: int = 8,
    sampled: Sequence[Example] = (),
    sampled_features: Features | None = None,
) -> Evaluation:
    """Draft chains at every place of the examples whose next tokens are in the loss mask.

    Args:
        depth: tokens of a chain; fewer if the draft weights have not as many (Medusa heads).
        sampled: texts that the target drew, for the estimate of sampling.
        sampled_features: of these; None for ``features``.

    Raises:
        ValueError: if there is no such place.
    """
    depth = min(depth, objective.deepest)

    def lived(features: Features, texts: Sequence[Example], name: str) -> Tensor:
        """``[drafts, depth]``: of each draft of the walk which tokens are accepted."""
        walked = []
        # An element reads two tokens and drafts ``depth``.
        usable = [each for each in texts if len(each.tokens) >= depth + 2]
        for start in range(0, len(usable), batch_size):
            batch = features(usable[start : start + batch_size])
            found = objective.agreement(batch, teacher, depth)
            accepted = getattr(found, name).long().cumprod(dim=1)
            walked.append(accepted[_walk(found.places.tolist(), accepted.sum(dim=1).tolist())])
        return torch.cat(
            [torch.empty(0, depth, device="cpu"), *(each.cpu() for each in walked)]
        ).double()

    drafts = lived(features, examples, "greedy")
    if not len(drafts):
        raise ValueError(
            f"the held-out texts have no place with {depth + 1} tokens of the loss mask in a row; give "
            "longer texts, or evaluate shorter drafts"
        )
    greedy = drafts.mean(dim=0)
    before = torch.cat([greedy.new_ones(1), greedy[:-1]])
    drawn = lived(sampled_features or features, sampled, "sampled")
    return Evaluation(
        len(drafts),
        tuple(greedy.tolist()),
        tuple((greedy / before.clamp(min=1e-12)).tolist()),
        tuple(drawn.mean(dim=0).tolist()) if len(drawn) else (),
    )


def _walk(places: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """The elements at which decoding drafts.

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
