"""The report of a call: what the controller measured and decided, as data and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec_ext.schedule.acceptance import CHAIN, LearntAcceptance
from specdec_ext.schedule.costs import Curve, DraftCosts, VerifyCosts
from specdec_ext.tree.config import LOOKUP

if TYPE_CHECKING:
    from specdec_ext.stats import SpeculationStats

# Names of steps in ``SpeculationStats.shapes``. The last two follow the name of the shape.
PLAIN_STEP, DROPPED, NOTHING_PROPOSED = "plain", ", dropped", ", nothing proposed"
# Half the width of a 95 % interval of the normal distribution, in standard errors.
HALF_WIDTH = 1.96
POSITIONS_SHOWN = 8
# Width of the interval relative to the gain above which no gain is reported.
TOO_WIDE = 0.5


@dataclass
class Gain:
    """The speed-up of a call: estimated time of plain decoding over time taken, each summed over steps.

    Attributes:
        plain: seconds that plain decoding would need. For a step without a draft this is the time that it
            took; for other steps, the time of plain steps for the same tokens.
        took: seconds that the steps took.
    """

    steps: int = 0
    plain: float = 0.0
    took: float = 0.0
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, took: float, plain: float) -> None:
        self.steps += 1
        self.plain += plain
        self.took += took
        for i, product in enumerate((plain * plain, plain * took, took * took)):
            self._squares[i] += product

    @property
    def ratio(self) -> float:
        return self.plain / self.took if self.took > 0 else 1.0

    def interval(self, reference_error: float = 0.0) -> tuple[float, float]:
        """The 95 % interval of the ratio, from the scatter of steps (delta method) and ``reference_error``.

        Args:
            reference_error: relative standard error of the plain step's time.
        """
        if self.steps < 2 or self.took <= 0:
            return 0.0, math.inf
        ratio = self.ratio
        residuals = self._squares[0] - 2 * ratio * self._squares[1] + ratio**2 * self._squares[2]
        scatter = max(residuals, 0.0) * self.steps / (self.steps - 1) / self.took**2
        error = math.sqrt(scatter + (ratio * reference_error) ** 2)
        return max(0.0, ratio - HALF_WIDTH * error), ratio + HALF_WIDTH * error


@dataclass
class Report:
    """What the controller knows at the end of a call, from this call and earlier ones.

    Attributes:
        verify: (rows, nodes, seconds of a step without its draft, number of times kept).
        drafts: (rows, family, levels, seconds, number of times kept).
        acceptance: kind of draft -> ([a_1, a_2, ...], observations of its first position, older ones faded).
        gain: speed relative to the estimated speed of plain decoding, in this call.
        low, high: the 95 % interval of ``gain``.
    """

    verify: list[tuple[int, int, float, int]]
    drafts: list[tuple[int, str, int, float, int]]
    acceptance: dict[str, tuple[list[float], float]]
    gain: float
    low: float
    high: float

    @classmethod
    def of(
        cls, verify: VerifyCosts, drafts: DraftCosts, acceptance: LearntAcceptance, gain: Gain
    ) -> Report:
        passes: dict[tuple[int, int], tuple[float, int]] = {}
        for (rows, _), curve in sorted(verify.curves.items()):
            for nodes in curve.sizes:  # the longest context comes last and stays
                passes[rows, nodes] = curve(nodes) or 0.0, curve.count(nodes)
        kinds = {
            kind: (
                acceptance.rates(kind, min(len(positions.judged), POSITIONS_SHOWN)),
                positions.at(0)[1],
            )
            for kind, positions in acceptance.kinds.items()
            if positions.judged
        }
        low, high = gain.interval(_reference_error(list(verify.curves.values())))
        return cls(
            [(*key, *value) for key, value in sorted(passes.items())],
            [
                (rows, family, size, curve(size) or 0.0, curve.count(size))
                for (rows, family), curve in sorted(drafts.curves.items())
                for size in curve.sizes
            ],
            kinds,
            gain.ratio,
            low,
            high,
        )


def _reference_error(curves: list[Curve]) -> float:
    """Relative standard error of the plain step's time on the curve with most measurements of it."""
    known = max(curves, key=lambda curve: curve.count(1), default=None)
    if known is None or not known.count(1):
        return math.inf
    return known.spread(1) / max(known(1) or 0.0, 1e-12)


def explain(stats: SpeculationStats) -> str:
    """:meth:`SpeculationStats.explain`."""
    if stats.policy == "none":
        return "Plain decoding without a drafter."
    if stats.report is None:
        return (
            f"{stats.drafter} drafted in every step (speculation='fixed'); nothing was measured or chosen. "
            f"Mean acceptance length {stats.mean_acceptance_length:.2f}."
        )
    report = stats.report
    lines = [f"{stats.drafter}, speculation='auto': {_verdict(stats)}", "", "steps"]
    total = sum(stats.shapes.values()) or 1
    for name, count in sorted(stats.shapes.items(), key=lambda item: -item[1]):
        lines.append(f"  {name:<44} {count:>6}  {count / total:>4.0%}")
    lines.append(f"  {'probes, included above':<44} {stats.probes:>6}")
    lines += ["", f"{'time of a step without its draft':<33}ms  times  vs 1 node"]
    plain = {rows: seconds for rows, nodes, seconds, _ in report.verify if nodes == 1}
    for rows, nodes, seconds, times in report.verify:
        ratio = f"{seconds / plain[rows]:.2f}x" if plain.get(rows) else ""
        what = f"  {_count(rows, 'row'):<8} {_count(nodes, 'node'):<14}"
        lines.append(f"{what} {seconds * 1e3:>9.3f} {times:>6}  {ratio:>9}")
    lines += ["", f"{'time of a draft':<33}ms  times"]
    for rows, family, depth, seconds, times in report.drafts:
        name = f"chain of {depth}" if family == CHAIN else "lookup" if family == LOOKUP else family
        lines.append(f"  {_count(rows, 'row'):<8} {name:<14} {seconds * 1e3:>9.3f} {times:>6}")
    lines += ["", "acceptance of positions 1, 2, ..., given that the position before was accepted"]
    for kind, (rates, judged) in report.acceptance.items():
        shown = " ".join(f"{rate:.2f}" for rate in rates)
        lines.append(f"  {kind:<24} {shown}   from {judged:.0f} recent drafts")
    return "\n".join(lines)


def _verdict(stats: SpeculationStats) -> str:
    report = stats.report
    assert report is not None
    drafted = sum(count for name, count in stats.shapes.items() if not _without_draft(name))
    total = sum(stats.shapes.values())
    if not drafted:
        return "no draft was verified. " + _why_off(stats)
    text = (
        f"{report.gain:.2f}x the estimated speed of plain decoding "
        f"(95 % interval: {report.low:.2f}x to {report.high:.2f}x)."
    )
    if report.high - report.low > TOO_WIDE * report.gain:
        measured = sum(times for _, nodes, _, times in report.verify if nodes == 1)
        text = (
            f"the call was too short to measure a speed-up: the times of {_count(total, 'step')} and of "
            f"{_count(measured, 'plain step')} for comparison scatter too much."
        )
    return text if drafted * 2 >= total else f"{text} {_why_off(stats)}"


def _why_off(stats: SpeculationStats) -> str:
    """The reason why most steps had no draft."""
    names = stats.shapes
    total = sum(names.values()) or 1
    nothing = sum(count for name, count in names.items() if name.endswith(NOTHING_PROPOSED))
    if nothing * 2 >= total:
        return "In most steps the drafter had nothing to propose."
    report = stats.report
    assert report is not None
    if not report.acceptance:
        return "The call ended before anything was drafted."
    kind, (rates, _) = max(report.acceptance.items(), key=lambda item: item[1][1])
    return (
        f"Most steps were plain: {rates[0]:.0%} of first draft tokens ({kind}) are right, which does not pay "
        "for the draft and the wider pass."
    )


def _without_draft(name: str) -> bool:
    """Whether no draft was verified in steps of this name."""
    return name == PLAIN_STEP or name.endswith((DROPPED, NOTHING_PROPOSED))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
