"""``compare_texts``: whether the candidate writes the texts of the baseline, near-ties apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec_ext.display.progress import tracked
from specdec_ext.evaluate.benchmark.prompts import Question
from specdec_ext.evaluate.benchmark.served import ServedContestant, ServedSeries
from specdec_ext.rollout.intervals import Interval
from specdec_ext.rollout.scored import Difference, judge, scored_text


@dataclass
class ComparedTexts:
    """The texts of a candidate beside those of a baseline.

    Attributes:
        prompts: number of prompts that both have answered.
        verdicts: name of each prompt with another text -> what the difference is, and why.
    """

    prompts: int
    verdicts: dict[str, tuple[Difference, str]] = field(default_factory=dict)

    def count(self, verdict: Difference) -> int:
        """Number of prompts whose texts differ in this way."""
        return sum(each == verdict for each, _ in self.verdicts.values())

    @property
    def equal(self) -> Interval:
        """Share of prompts with equal texts; near-ties count as equal.

        Differences that could not be judged make the interval.
        """
        unknown = self.count("unknown")
        low = 1 - (self.count("other text") + unknown) / self.prompts
        if not unknown:
            return Interval.exact(low)
        note = f"{unknown} of {self.prompts} texts differ for an unknown reason"
        return Interval(low, low, low + unknown / self.prompts, note)

    def summary(self) -> str:
        """The counts, such as ``"78/80 equal, near-tie: 2"``."""
        parts = [f"{self.prompts - len(self.verdicts)}/{self.prompts} equal"]
        verdicts = Counter(verdict for verdict, _ in self.verdicts.values())
        return ", ".join([*parts, *(f"{each}: {number}" for each, number in verdicts.items())])

    def sentences(self) -> list[str]:
        """A sentence for each prompt with another text."""
        return [
            f"prompt {name}: {verdict}, {why}" for name, (verdict, why) in self.verdicts.items()
        ]


def compare_texts(
    baseline: ServedSeries,
    candidate: ServedSeries,
    contestants: Mapping[str, ServedContestant],
    asked: Sequence[Question],
    max_new_tokens: int,
    temperature: float,
) -> ComparedTexts:
    """Compare the texts of all turns, and judge those that differ.

    A text is equal if the baseline has written it in any turn of the stage. Greedy texts that differ are
    asked for again, with log probabilities; sampled ones are not judged.

    Args:
        baseline, candidate: both have answered the same questions.
        contestants: the two by the names of their series.
        asked: all questions.
        max_new_tokens, temperature: with which the questions were asked.
    """
    found = ComparedTexts(len(candidate.places))
    differing = [
        (asked[place], expected[0], other)
        for place, expected, texts in zip(
            candidate.places, baseline.answers, candidate.answers, strict=True
        )
        if (other := next((text for text in texts if text not in expected), None)) is not None
    ]
    with tracked("judging texts that differ", len(differing), "text") as work:
        for question, expected, other in differing:
            found.verdicts[question.name] = (
                ("unknown", "the texts were sampled")
                if temperature
                else _judged(
                    question,
                    (expected, other),
                    (contestants[baseline.name], contestants[candidate.name]),
                    max_new_tokens,
                )
            )
            work.advance()
    return found


def _judged(
    question: Question,
    texts: tuple[str, str],
    contestants: tuple[ServedContestant, ServedContestant],
    max_new_tokens: int,
) -> tuple[Difference, str]:
    try:
        scored = [
            scored_text(each.server, question, max_tokens=max_new_tokens, **each.fields)
            for each in contestants
        ]
    except ValueError as error:
        return "unknown", str(error)
    return judge(*texts, *scored)
