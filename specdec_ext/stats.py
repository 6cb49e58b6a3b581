"""Counters of one ``generate`` call and the metrics derived from them.

Definitions as in the literature's careful half: acceptance is counted per draft, the bonus or correction
token is not an accepted draft, and a step without a draft counts as a step but not as a draft.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from specdec_ext.display import Summarised
from specdec_ext.schedule.report import Report, explain

# A draft whose first token is hardly ever accepted: a model that was made for the target gets many times this
# share, one that reads the wrong layers or another vocabulary gets next to nothing.
ALARM_WINDOW = 100  # drafts
ALARM_SHARE = 0.02


@dataclass(repr=False)
class SpeculationStats(Summarised):
    """What speculation did during one call.

    A *step* is one row taking part in one target pass after the prompt; a *draft* is such a step in which
    at least one token was proposed.

    Attributes:
        drafter: name of the drafter.
        steps: row-steps, with and without drafts.
        drafts: row-steps with at least one drafted token.
        draft_tokens: drafted tokens (tree nodes without the root).
        accepted_tokens: drafted tokens that were emitted.
        emitted_tokens: tokens emitted by these steps; each row's first token comes from the prompt pass
            and is not among them.
        proposed_per_position: drafts that proposed a token at depth i + 1.
        reached_per_position: those of them in which everything before depth i + 1 was accepted.
        accepted_per_position: drafts whose token at depth i + 1 was accepted.
        policy: ``"auto"``, ``"fixed"``, or ``"none"`` without a drafter.
        shapes: steps of the whole batch by what was drafted; in ``"auto"`` alone.
        dropped: steps whose draft was not verified.
        probes: steps that tried what was not in use, to see whether it has become better.
        reruns: target passes that were run again without drafts, because logits of the first were NaN. Then
            tokens of the draft overflow the model's dtype, or the model is broken.
        report: what the controller measured; :meth:`explain` puts it into words.
        seconds: wall time by phase: ``prefill``, ``draft``, ``verify`` (target pass and walk), ``commit``.
    """

    drafter: str = "none"
    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    proposed_per_position: list[int] = field(default_factory=list)
    reached_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "commit": 0.0}
    )

    policy: str = "none"
    shapes: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    probes: int = 0
    reruns: int = 0
    report: Report | None = None

    def summary(self) -> str:
        return (
            f"{self.drafter}, {self.policy}: {self.emitted_tokens} tokens in {self.steps} steps, "
            f"{self.accepted_tokens} of {self.draft_tokens} draft tokens accepted, mean acceptance length "
            f"{self.mean_acceptance_length:.2f}"
        )

    def details(self) -> Iterable[tuple[str, ...]]:
        yield "tokens per step", f"{self.emitted_per_step:.2f}"
        for phase, seconds in self.seconds.items():
            yield phase, f"{seconds * 1e3:.1f} ms"
        for position, share in enumerate(self.acceptance_per_position, 1):
            yield f"accepted up to position {position}", f"{share:.0%}"

    def count_shape(self, name: str, steps: int = 1) -> None:
        """Steps of the whole batch."""
        self.shapes[name] = self.shapes.get(name, 0) + steps

    def explain(self) -> str:
        """Why it drafted as it did: costs, acceptance, what was chosen how often, and what that gained."""
        return explain(self)

    def count_step(
        self, draft_tokens: int, depth: int, num_accepted: int, num_emitted: int
    ) -> None:
        """One row's step: ``draft_tokens`` proposed in a tree of ``depth`` levels below the root."""
        self.steps += 1
        self.emitted_tokens += num_emitted
        if depth == 0:
            return
        self.drafts += 1
        self.draft_tokens += draft_tokens
        self.accepted_tokens += num_accepted
        counters = (
            self.proposed_per_position,
            self.reached_per_position,
            self.accepted_per_position,
        )
        for counter in counters:
            counter.extend([0] * (depth - len(counter)))
        for level in range(depth):
            self.proposed_per_position[level] += 1
            self.reached_per_position[level] += level <= num_accepted
            self.accepted_per_position[level] += level < num_accepted

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; always read together with the draft length."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per draft, the bonus or correction token included: ``1 + accepted / drafts``."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def emitted_per_step(self) -> float:
        """Tokens emitted per target pass and row after the prompt, steps without drafts included."""
        return self.emitted_tokens / self.steps if self.steps else 1.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of all drafts whose first i tokens were accepted (unconditional), for i = 1, 2, ..."""
        return [count / self.drafts for count in self.accepted_per_position]

    @property
    def conditional_acceptance(self) -> list[float]:
        """P(position i accepted | position i - 1 accepted and a token proposed at i)."""
        return [
            accepted / reached if reached else 0.0
            for accepted, reached in zip(
                self.accepted_per_position, self.reached_per_position, strict=True
            )
        ]


class DraftAlarm:
    """Warns, once per call, when over a window of drafts almost no first token was accepted.

    Args:
        stats: of the call.
        advice: what to check, :attr:`Drafter.dead_draft_advice`; "" never warns.
    """

    def __init__(self, stats: SpeculationStats, advice: str):
        self._stats, self._advice = stats, advice
        self._drafts = self._accepted = 0  # before the window

    def check(self) -> None:
        """After each step."""
        drafts = self._stats.drafts - self._drafts
        if not self._advice or drafts < ALARM_WINDOW:
            return
        accepted = self._stats.accepted_per_position[0] - self._accepted
        self._drafts += drafts
        self._accepted += accepted
        if accepted < ALARM_SHARE * drafts:
            warnings.warn(
                f"{self._stats.drafter}: of the last {drafts} drafts {accepted} had their first token "
                f"accepted, so drafting only costs time (the text is right all the same). {self._advice}",
                stacklevel=2,
            )
            self._advice = ""
