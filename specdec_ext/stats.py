"""Counters of one ``generate`` call and the metrics derived from them.

Acceptance is counted per draft. The bonus or correction token is not an accepted draft token. A step without
a draft counts as a step, but not as a draft.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import Literal, TypeVar

from specdec_ext.display import Summarised, Table
from specdec_ext.report import Report

# The warning appears if, over this many drafts, less than this share of first tokens was accepted. A drafter
# made for the target reaches many times this share; one with the wrong layers or vocabulary has almost none.
ALARM_WINDOW = 100  # drafts
ALARM_SHARE = 0.02
# Names of steps in ``SpeculationStats.shapes``. The last two follow the name of the shape.
PLAIN_STEP, DROPPED, NOTHING_PROPOSED = "plain", ", dropped", ", nothing proposed"
Count = TypeVar("Count", int, float)


@dataclass(repr=False)
class SpeculationStats(Summarised):
    """The statistics of one call.

    A *step* is one row in one target pass after the prompt. A *draft* is a step in which at least one token
    was proposed and verified.

    Attributes:
        drafter: class name of the drafter.
        steps: number of steps, with and without drafts.
        drafts: number of drafts.
        draft_tokens: number of drafted tokens: tree nodes without the root.
        accepted_tokens: number of drafted tokens that were accepted.
        emitted_tokens: number of tokens emitted in these steps. The first token of each row comes from the
            prompt pass and is not counted.
        proposed_per_position: for each i, drafts that proposed a token at depth i + 1.
        reached_per_position: for each i, the drafts among them in which all tokens before depth i + 1 were
            accepted.
        accepted_per_position: for each i, drafts whose token at depth i + 1 was accepted.
        policy: ``"auto"``, ``"fixed"``, or ``"none"`` without a drafter.
        shapes: steps of the whole batch by the shape that was drafted; only with ``"auto"``.
        dropped: steps of the whole batch whose draft was not verified.
        nothing_proposed: steps of the whole batch in which the drafter had nothing to propose.
        probes: steps of the whole batch that tried an option that was not in use.
        timed_seconds: seconds of the steps that the controller has timed; only with ``"auto"``.
        plain_seconds: estimated seconds of plain decoding for the same tokens.
        reruns: target passes that were repeated without drafts, because the logits contained NaN. In this
            case drafted tokens overflow the model's dtype, or the model is broken.
        host_processors: class names of the logits processors that are called at every visited node, with the
            text on the host. Without them, processors are computed at all nodes of a tree at once.
        report: what the controller measured; :meth:`explain` describes it. None unless ``"auto"``.
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

    policy: Literal["none", "fixed", "auto"] = "none"
    shapes: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    nothing_proposed: int = 0
    probes: int = 0
    timed_seconds: float = 0.0
    plain_seconds: float = 0.0
    reruns: int = 0
    host_processors: list[str] = field(default_factory=list)
    report: Report | None = None

    def summary(self) -> str:
        counts = f"{self.emitted_tokens} tokens in {self.steps} steps"
        if self.policy == "none":
            return f"plain decoding: {counts}"
        drafted = "no draft was verified"
        if self.drafts:
            drafted = (
                f"{self.accepted_tokens} of {self.draft_tokens} draft tokens accepted, mean acceptance "
                f"length {self.mean_acceptance_length:.2f}"
            )
        return f"{self.drafter}, {self.policy}: {counts}, {drafted}"

    def tables(self) -> Iterable[Table]:
        yield Table(
            (
                ("tokens per step", f"{self.emitted_per_step:.2f}"),
                *(("called at every visited node", name) for name in self.host_processors),
                *((phase, f"{seconds * 1e3:.1f} ms") for phase, seconds in self.seconds.items()),
                *(
                    (f"drafts accepted up to position {position}", f"{share:.0%}")
                    for position, share in enumerate(self.acceptance_per_position, 1)
                ),
            )
        )

    def explain(self) -> str:
        """Explain what was drafted and why, in at most 80 columns: speed-up, steps, costs, acceptance."""
        from specdec_ext.display.console import plain_text

        if self.policy == "none":
            return "Plain decoding without a drafter."
        if self.report is None:
            return plain_text(
                f"{self.drafter} drafted in every step (speculation='fixed'); nothing was measured or "
                f"chosen. Mean acceptance length {self.mean_acceptance_length:.2f}. With "
                "speculation='auto', the default, steps draft only where that saves time, and this text "
                "says how much.",
                *self.tables(),
            )
        total = sum(self.shapes.values())
        shapes = sorted(self.shapes.items(), key=lambda item: -item[1])
        steps = [(name, str(count), f"{count / total:.0%}") for name, count in shapes]
        return plain_text(
            f"{self.drafter}, speculation='auto': {self._verdict(self.report, total)}",
            Table(
                [*steps, ("probes, included above", str(self.probes), "")], ("", "steps", "share")
            ),
            *self.report.tables(),
        )

    def _verdict(self, report: Report, total: int) -> str:
        plain = self.shapes.get(PLAIN_STEP, 0)
        verified = total - plain - self.dropped - self.nothing_proposed
        if total and self.nothing_proposed * 2 >= total:
            why_off = (
                "In most steps the drafter had nothing to propose. A draft head or a draft model proposes "
                "new text, too."
            )
        else:
            why_off = report.why_plain()
        if not verified:
            return f"no draft was verified. {why_off}"
        speed_up = report.speed_up(total)
        return speed_up if verified * 2 >= total else f"{speed_up} {why_off}"

    def add(self, other: SpeculationStats) -> None:
        """Add the counts of another call. Drafter, policy and report become those of the other call."""
        for name in ("drafter", "policy", "report"):
            setattr(self, name, getattr(other, name))
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, dict):
                for key, count in value.items():
                    mine[key] = mine.get(key, 0) + count
            elif name == "host_processors":
                mine += [each for each in value if each not in mine]
            elif isinstance(value, list):
                mine += [0] * (len(value) - len(mine))
                for i, count in enumerate(value):
                    mine[i] += count
            elif isinstance(value, int | float):
                setattr(self, name, mine + value)

    def count_plain(self, steps: int = 1) -> None:
        """Count plain steps of the whole batch."""
        self.shapes[PLAIN_STEP] = self.shapes.get(PLAIN_STEP, 0) + steps

    def count_draft(self, shape: str, proposed: bool, verified: bool) -> None:
        """Count a step of the whole batch in which the drafter was asked for a draft.

        Args:
            shape: name of the requested shape.
            proposed: whether the drafter proposed a token for any row.
            verified: whether the target scored a proposed token.
        """
        if not verified:
            self.dropped += proposed
            self.nothing_proposed += not proposed
            shape += DROPPED if proposed else NOTHING_PROPOSED
        self.shapes[shape] = self.shapes.get(shape, 0) + 1

    def count_step(
        self, draft_tokens: int, depth: int, num_accepted: int, num_emitted: int
    ) -> None:
        """Count a step of one row.

        Args:
            draft_tokens: number of verified draft tokens.
            depth: number of levels below the root; 0 without a draft.
            num_accepted: number of accepted draft tokens.
            num_emitted: number of emitted tokens.
        """
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
        """Accepted tokens over drafted tokens. It depends on the draft length, so show both together."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per draft, with the bonus or correction token: ``1 + accepted_tokens / drafts``."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def emitted_per_step(self) -> float:
        """Tokens emitted per step, with and without drafts."""
        return self.emitted_tokens / self.steps if self.steps else 1.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of drafts whose first i tokens were accepted, for i = 1, 2, ... (unconditional)."""
        return [count / self.drafts for count in self.accepted_per_position]

    @property
    def conditional_acceptance(self) -> list[float]:
        """P(position i accepted | position i - 1 accepted and a token proposed at i), for i = 1, 2, ..."""
        return [
            accepted / reached if reached else 0.0
            for accepted, reached in zip(
                self.accepted_per_position, self.reached_per_position, strict=True
            )
        ]


def reached_with_one_length(drafts: Count, accepted: Sequence[Count]) -> list[Count]:
    """Drafts that reached positions 1, 2, ... if all had one length: those accepted up to the one before.

    If some were shorter, fewer reached a position, and its acceptance was higher than these counts say.

    Args:
        drafts: number of drafts.
        accepted: for each position, drafts whose tokens up to it were accepted.
    """
    return list(islice(chain((drafts,), accepted), len(accepted)))


def consistent(drafts: int, reached: Sequence[int], accepted: Sequence[int]) -> bool:
    """Whether all drafts reach the first position, and of those accepted at one some or all the next."""
    falling = [drafts, *chain.from_iterable(zip(reached, accepted, strict=False)), 0]
    return (
        len(reached) == len(accepted)
        and all(after <= before for before, after in pairwise(falling))
        and list(reached[:1]) in ([], [drafts])
    )


class DraftAlarm:
    """Warns once per call if almost no first token was accepted over a number of drafts.

    Args:
        stats: the statistics of the call.
        advice: the hint in the warning, :attr:`Drafter.low_acceptance_hint`; "" never warns.
    """

    def __init__(self, stats: SpeculationStats, advice: str):
        self._stats, self._advice = stats, advice
        self._drafts = self._accepted = 0  # counts before the current window

    def check(self) -> None:
        """Call this after each step."""
        drafts = self._stats.drafts - self._drafts
        if not self._advice or drafts < ALARM_WINDOW:
            return
        accepted = self._stats.accepted_per_position[0] - self._accepted
        self._drafts += drafts
        self._accepted += accepted
        if accepted < ALARM_SHARE * drafts:
            warnings.warn(
                f"{self._stats.drafter}: in the last {drafts} drafts, the first token was accepted "
                f"{accepted} times. Such drafts only cost time; the text is still correct. {self._advice}",
                stacklevel=2,
            )
            self._advice = ""
