"""Counters of one ``generate`` call and the metrics derived from them.

Definitions as in the literature's careful half: acceptance is counted per draft, the bonus or correction
token is not an accepted draft, and a step without a draft counts as a step but not as a draft.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specdec_ext.display import Summarised
from specdec_ext.explain import Report, explain
from specdec_ext.tree import DraftTree

# A draft whose first token is hardly ever accepted: a model that was made for the target gets many times this
# share, one that reads the wrong layers or another vocabulary gets next to nothing.
ALARM_WINDOW = 100  # drafts
ALARM_SHARE = 0.02
# As many from the very first, none of them right: with one in four right that comes once in a hundred.
NEVER_WINDOW = 16
# Steps in which a controller could ask the model, and the share in which it must find that worth it.
PAYS_WINDOW = 256
PAYS_SHARE = 0.02


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


@dataclass
class PairVerdict:
    """Whether a drafter does anything for a model, over all calls with the two; says so once if it does not.

    Drafts are judged by their *first tokens*, verified or not: the text that came tells whether the next
    token was among them. Copies of the text count neither for nor against a model-based drafter.

    Attributes:
        ever: a first token was accepted once.
        drafts: model-based proposals since the last look.
        accepted: of these, those with the right first token.
        steps: steps of the batch that copies left to the model, and the controller was free to use it.
        asked: of these, those in which it did.
        told: what was said already.
    """

    ever: bool = False
    drafts: int = 0
    accepted: int = 0
    steps: int = 0
    asked: int = 0
    told: set[str] = field(default_factory=set)

    def count(
        self, proposal: DraftTree | None, kinds: Sequence[str], emitted: Sequence[Sequence[int]]
    ) -> None:
        """One step of some rows.

        Args:
            proposal: as the drafter made it, before any of it was dropped; None if it was not asked.
            kinds: :attr:`Drafter.kinds` of the rows; "" for what a model drafted.
            emitted: the tokens that came.
        """
        found = set() if proposal is None else self._count(proposal, kinds, emitted)
        if found <= {""}:  # nothing was copied
            self.steps += 1
            self.asked += bool(found)

    def _count(
        self, proposal: DraftTree, kinds: Sequence[str], emitted: Sequence[Sequence[int]]
    ) -> set[str]:
        """The kinds of what was proposed."""
        found = set()
        rows = zip(proposal.token_lists, proposal.parent_lists, kinds, emitted, strict=True)
        for tokens, parents, kind, text in rows:
            firsts = [token for token, parent in zip(tokens, parents, strict=True) if parent == 0]
            if not firsts:
                continue
            found.add(kind)
            if not kind:
                self.drafts += 1
                self.accepted += text[0] in firsts
        return found

    def check(self, stats: SpeculationStats, advice: str) -> None:
        """After each step.

        Args:
            stats: of the call.
            advice: what to check, :attr:`Drafter.dead_draft_advice`; "" never warns.
        """
        self.ever |= self.accepted > 0
        never = not self.ever and self.drafts >= NEVER_WINDOW
        whole = self.drafts >= ALARM_WINDOW
        if never or (whole and self.accepted < ALARM_SHARE * self.drafts):
            self._tell_never(stats.drafter, advice)
        if whole:
            self.drafts = self.accepted = 0
        if stats.policy != "auto":
            self.steps = self.asked = 0
        elif self.steps >= PAYS_WINDOW:
            if self.asked < PAYS_SHARE * self.steps:
                self._tell_rest(stats.drafter, advice)
            self.steps = self.asked = 0

    def _tell_never(self, drafter: str, advice: str) -> None:
        self._tell(
            drafter,
            advice,
            "never accepted",
            f"of the last {self.drafts} drafts {self.accepted} had their first token accepted, so drafting "
            f"only costs time (the text is right all the same). {advice}",
        )

    def _tell_rest(self, drafter: str, advice: str) -> None:
        """It is hardly asked any more: because it was never right, or because it takes too long."""
        if not self.ever and self.drafts:
            self._tell_never(drafter, advice)
        elif "never accepted" not in self.told:
            self._tell(
                drafter,
                advice,
                "not paying",
                f"in {self.steps} steps it was asked {self.asked} times: here a draft costs more than it "
                "brings (the text is right all the same; out.speculation.explain() shows what was measured). "
                "Pass drafter=None, or a faster drafter such as 'ngram'.",
            )

    def _tell(self, drafter: str, advice: str, what: str, message: str) -> None:
        if advice and what not in self.told:
            self.told.add(what)
            warnings.warn(f"{drafter}: {message}", stacklevel=2)
