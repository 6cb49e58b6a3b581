"""``Report`` and ``Decision``: what the controller has measured in a call, and what it decided last."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from specdec_ext.display import Summarised, Table
from specdec_ext.display.text import counted

# Width of the interval relative to the gain above which no gain is reported.
TOO_WIDE = 0.5


@dataclass(frozen=True)
class Estimate:
    """What the controller expects of a step.

    Attributes:
        name: ``"plain"``, or the name of the draft's shape as in :attr:`SpeculationStats.shapes`.
        tokens: emitted tokens, summed over the rows.
        seconds: time of the step; None before a plain step was measured.
        rate: tokens per second if all steps to the end of the text were like this one; None with ``seconds``.
    """

    name: str
    tokens: float
    seconds: float | None
    rate: float | None


@dataclass(frozen=True)
class Decision:
    """What the controller chose, and from what.

    Attributes:
        rows: number of rows of the step.
        chosen: name of the estimate that was chosen. It need not have the highest rate: what is in use is
            favoured, and drafts must promise a margin.
        pays: whether drafts may be chosen. They may not while they have lost more time than they gained.
        estimates: all that could be chosen.
    """

    rows: int
    chosen: str
    pays: bool
    estimates: list[Estimate]


@dataclass(repr=False)
class Report(Summarised):
    """What the controller knows at the end of a call, from this call and earlier ones.

    Attributes:
        verify: (rows, nodes, seconds of a step without its draft, number of times kept).
        drafts: (rows, name of the drafts, seconds of a draft, number of times kept).
        acceptance: (kind of draft, [a_1, a_2, ...], observations of its first position, older ones faded).
        gain: speed relative to the estimated speed of plain decoding, in this call.
        low, high: the 95 % interval of ``gain``.
        decision: the last decision of the call; None if there was none.
    """

    verify: list[tuple[int, int, float, int]]
    drafts: list[tuple[int, str, float, int]]
    acceptance: list[tuple[str, list[float], float]]
    gain: float
    low: float
    high: float
    decision: Decision | None = None

    def summary(self) -> str:
        interval = f"95 % interval: {self.low:.2f}x to {self.high:.2f}x"
        if math.isinf(self.high):
            interval = "too few steps for an interval"
        return f"{self.gain:.2f}x the estimated speed of plain decoding ({interval})"

    def tables(self) -> Iterable[Table]:
        plain = {rows: seconds for rows, nodes, seconds, _ in self.verify if nodes == 1}
        passes = [
            (
                str(rows),
                str(nodes),
                f"{seconds * 1e3:.3f}",
                str(times),
                f"{seconds / plain[rows]:.2f}x" if plain.get(rows) else "",
            )
            for rows, nodes, seconds, times in self.verify
        ]
        drafts = [
            (str(rows), name, f"{seconds * 1e3:.3f}", str(times))
            for rows, name, seconds, times in self.drafts
        ]
        kinds = [
            (kind, f"{judged:.0f}", " ".join(f"{rate:.2f}" for rate in rates))
            for kind, rates, judged in self.acceptance
        ]
        title = "time of a step without its draft"
        yield Table(passes, ("rows", "nodes", "ms", "times", "vs 1 node"), title)
        if drafts:
            yield Table(drafts, ("rows", "draft", "ms", "times"), "time of a draft")
        if kinds:
            title = "acceptance of positions 1, 2, ..., given that the position before was accepted"
            yield Table(kinds, ("recent drafts", "count", "acceptance"), title)

    def speed_up(self, steps: int) -> str:
        """Describe the gain in this call of ``steps`` steps."""
        if self.high - self.low > TOO_WIDE * self.gain:
            measured = sum(times for _, nodes, _, times in self.verify if nodes == 1)
            return (
                f"the call was too short to measure a speed-up: the times of {counted(steps, 'step')} and of "
                f"{counted(measured, 'plain step')} for comparison scatter too much."
            )
        return f"{self.summary()}."

    def why_plain(self) -> str:
        """The reason why most steps were plain although the drafter had something to propose."""
        if not self.acceptance:
            return "The call ended before anything was drafted."
        kind, rates, _ = max(self.acceptance, key=lambda known: known[2])
        return (
            f"Most steps were plain: {rates[0]:.0%} of first draft tokens ({kind}) are right, which does not "
            "pay for the draft and the wider pass. `specdec bench` compares other drafters on your prompts."
        )
