"""Estimate the acceptance length of a head during training, without generating text.

The head drafts at every place of held-out texts, and the number of accepted draft tokens is computed for each
place. Decoding is simulated as a walk over these places: each step moves past the accepted draft tokens and
the one token that the target adds. For a text that the target wrote greedily, the walk equals greedy
decoding draft by draft. For a text that it sampled, the walk has the law of sampling with coupled drafts, as
``generate`` makes and verifies them: the noise of every place is drawn given the sampled token. For other
texts the result is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import Work, tracked
from specdec_ext.training.data.batches import Example, Features
from specdec_ext.training.data.regenerate import regenerate
from specdec_ext.training.objectives.objective import Objective
from specdec_ext.training.objectives.teacher import Teacher

# Number of texts that are sampled for an estimate and most tokens of each: a few thousand drafts in all.
_SAMPLED_TEXTS, _SAMPLED_TOKENS = 32, 128


@dataclass(frozen=True)
class HeldOut:
    """Texts for the evaluation of a head; it is not trained on them.

    Attributes:
        texts: texts of the training domain, for the estimate of greedy decoding.
        sampled: continuations that the target sampled (:func:`sampled_texts`), for the estimate of sampling.
        old: texts of the domain that the head was trained for before, to measure what it forgets.
        features: computes the hidden states of ``sampled``, which a dump does not contain; None uses the same
            as for ``texts``.
    """

    texts: Sequence[Example] = ()
    sampled: Sequence[Example] = ()
    old: Sequence[Example] = ()
    features: Features | None = None


@dataclass(frozen=True)
class Evaluation(Summarised):
    """Acceptance of simulated drafts, which are chains of ``len(greedy)`` tokens.

    Attributes:
        drafts: number of drafts in greedy decoding.
        greedy: for each position, the share of drafts that are accepted up to and including it.
        conditional: for each position, the share among drafts that are accepted up to the position before.
        sampled: like ``greedy``, for sampling; empty without sampled texts.
    """

    drafts: int
    greedy: tuple[float, ...]
    conditional: tuple[float, ...]
    sampled: tuple[float, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per step in greedy decoding, including the target's own token."""
        return 1 + sum(self.greedy)

    @property
    def sampled_acceptance_length(self) -> float:
        """Mean number of tokens per step in sampling; NaN without sampled texts."""
        return 1 + sum(self.sampled) if self.sampled else math.nan

    def summary(self) -> str:
        sampled = ""
        if self.sampled:
            sampled = f", {self.sampled_acceptance_length:.2f} sampled at temperature 1"
        shares = " ".join(f"{share:.2f}" for share in self.conditional)
        return f"mean acceptance length {self.acceptance_length:.2f} greedy{sampled}; by position {shares}"

    def sentences(self) -> Iterable[str]:
        yield (
            f"On held-out texts a step emits {self.acceptance_length:.2f} tokens in greedy decoding, the "
            f"target's own token included, with chains of {len(self.greedy)} draft tokens. This was computed "
            f"from {self.drafts} drafts along the texts, without generating any."
        )
        yield (
            "What that gains depends on the cost of a step: `specdec bench MODEL --drafter FOLDER` measures "
            "it."
        )

    def tables(self) -> Iterable[Table]:
        columns = {"accepted": self.greedy, "given the one before": self.conditional}
        if self.sampled:
            columns["accepted, sampled"] = self.sampled
        rows = [
            (str(position), *(f"{share:.0%}" for share in shares))
            for position, shares in enumerate(zip(*columns.values(), strict=True), 1)
        ]
        yield Table(rows, ("position", *columns))


def sampled_texts(
    model: PreTrainedModel, texts: Sequence[Example], cache_file: Path, seed: int = 0
) -> list[Example]:
    """Let the target continue the beginnings of some texts, sampling at temperature 1.

    Args:
        model: the target.
        texts: at most 32 of them, evenly spread, are continued. The beginning of a text ends before the first
            token of its loss mask; if that is the first token of the text, it is the first quarter.
        cache_file: file of the continuations, see ``regenerate``.
        seed: seed of the sampling.
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
        objective: the head.
        features: computes or reads the hidden states of ``examples``.
        teacher: of the target.
        examples: texts for the estimate of greedy decoding.
        depth: number of tokens of a chain; Medusa heads limit it to the number of heads.
        batch_size: number of texts per pass.
        sampled: texts that the target sampled, for the estimate of sampling.
        sampled_features: as ``features`` for the sampled texts; None uses ``features``.

    Raises:
        ValueError: if there is no such place.
    """
    depth = min(depth, objective.deepest)

    def accepted_drafts(
        features: Features,
        texts: Sequence[Example],
        work: Work,
        noise: torch.Generator | None = None,
    ) -> Tensor:
        """``[drafts, depth]``: 1 for each token of each draft of the walk that is accepted."""
        walked = []
        # An element reads two tokens and drafts ``depth`` tokens.
        usable = [each for each in texts if len(each.tokens) >= depth + 2]
        for start in range(0, len(usable), batch_size):
            batch = features(usable[start : start + batch_size])
            found = objective.agreement(batch, teacher, depth, noise)
            accepted = found.accepted.long().cumprod(dim=1)
            walked.append(accepted[_walk(found.places.tolist(), accepted.sum(dim=1).tolist())])
            work.advance(len(batch.lengths))
        return torch.cat(
            [torch.empty(0, depth, device="cpu"), *(each.cpu() for each in walked)]
        ).double()

    with tracked("evaluating", len(examples) + len(sampled), "text") as work:
        drafts = accepted_drafts(features, examples, work)
        if not len(drafts):
            raise ValueError(
                f"the held-out texts have no {depth + 1} consecutive tokens in the loss mask; pass longer "
                "texts, or evaluate shorter drafts"
            )
        # The same noise in every evaluation, so that a difference is one of the weights.
        noise = torch.Generator(teacher.weight.device).manual_seed(0)
        drawn = accepted_drafts(sampled_features or features, sampled, work, noise)
    greedy = drafts.mean(dim=0)
    before = torch.cat([greedy.new_ones(1), greedy[:-1]])
    return Evaluation(
        len(drafts),
        tuple(greedy.tolist()),
        tuple((greedy / before.clamp(min=1e-12)).tolist()),
        tuple(drawn.mean(dim=0).tolist()) if len(drawn) else (),
    )


def _walk(places: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """Return the indices of the places at which decoding would draft.

    Args:
        places: ascending; after a gap another text, or another answer in it, begins.
        accepted: number of accepted draft tokens at each place.
    """
    visited, free_from, last = [], 0, -2
    for index, (place, count) in enumerate(zip(places, accepted, strict=True)):
        if place >= free_from or place != last + 1:
            visited.append(index)
            free_from = place + count + 1
        last = place
    return visited
