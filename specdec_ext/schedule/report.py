"""What the controller learnt and decided in a call, as data and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec_ext.schedule.acceptance import CHAIN, LearntAcceptance
from specdec_ext.schedule.costs import Curve, DraftCosts, VerifyCosts

if TYPE_CHECKING:
    from specdec_ext.stats import SpeculationStats

# Of a normal distribution: what an interval of 95 % reaches to, in standard errors.
REACH = 1.96
POSITIONS_SHOWN = 8
# Width of an interval, as a share of the ratio, from which on nothing is said about the gain.
TOO_WIDE = 0.5


@dataclass
class Gain:
    """Time of plain decoding over time taken, as a ratio of sums over steps.

    ``plain`` of a step without a draft is the time that it took; of another one what its tokens would have
    taken in plain steps.
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
        """Of 95 %: by the scatter of steps (delta method) and the relative error of the plain step's time."""
        if self.steps < 2 or self.took <= 0:
            return 0.0, math.inf
        ratio = self.ratio
        residuals = self._squares[0] - 2 * ratio * self._squares[1] + ratio**2 * self._squares[2]
        scatter = max(residuals, 0.0) * self.steps / (self.steps - 1) / self.took**2
        error = math.sqrt(scatter + (ratio * reference_error) ** 2)
        return max(0.0, ratio - REACH * error), ratio + REACH * error


@dataclass
class Report:
    """What was learnt, as it stands at the end of a call.

    Attributes:
        verify: (rows, nodes, seconds of a step without its draft, times measured).
        drafts: (rows, family, levels, seconds, times measured).
        acceptance: kind of draft -> (a_1, a_2, ...), and how often its first position was judged, fading.
        gain: speed against the estimate of plain decoding.
        low, high: its interval of 95 %.
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
            for nodes in curve.sizes:  # of the longest context
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
    """Relative standard error of a plain step's time, where it was measured most often."""
    known = max(curves, key=lambda curve: curve.count(1), default=None)
    if known is None or not known.count(1):
        return math.inf
    return known.spread(1) / max(known(1) or 0.0, 1e-12)


def explain(stats: SpeculationStats) -> str:
    """:meth:`SpeculationStats.explain`."""
    if stats.policy == "none":
        return "Plain decoding: there was no drafter."
    if stats.report is None:
        return (
            f"{stats.drafter} drafted in every step (speculation='fixed'): nothing was measured or chosen. "
            f"Mean acceptance length {stats.mean_acceptance_length:.2f}."
        )
    report = stats.report
    lines = [f"{stats.drafter}, speculation='auto': {_verdict(stats)}", "", "steps"]
    total = sum(stats.shapes.values()) or 1
    for name, count in sorted(stats.shapes.items(), key=lambda item: -item[1]):
        lines.append(f"  {name:<44} {count:>6}  {count / total:>4.0%}")
    lines.append(f"  of them to try what was not in use           {stats.probes:>6}")
    lines += ["", "a step without its draft        ms  times   to 1 node"]
    plain = {rows: seconds for rows, nodes, seconds, _ in report.verify if nodes == 1}
    for rows, nodes, seconds, times in report.verify:
        ratio = f"{seconds / plain[rows]:.2f}x" if plain.get(rows) else ""
        what = f"  {_count(rows, 'row'):<8} {_count(nodes, 'node'):<12}"
        lines.append(f"{what} {seconds * 1e3:>9.3f} {times:>6}   {ratio:>9}")
    lines += ["", "a draft                         ms  times"]
    for rows, family, depth, seconds, times in report.drafts:
        name = f"chain of {depth}" if family == CHAIN else family
        lines.append(f"  {_count(rows, 'row'):<8} {name:<12} {seconds * 1e3:>9.3f} {times:>6}")
    lines += [
        "",
        "acceptance of a position where the one before was accepted (judged: how often, old ones fade)",
    ]
    for kind, (rates, judged) in report.acceptance.items():
        shown = " ".join(f"{rate:.2f}" for rate in rates)
        lines.append(f"  {kind:<24} {shown}   judged {judged:.0f}")
    return "\n".join(lines)


def _verdict(stats: SpeculationStats) -> str:
    report = stats.report
    assert report is not None
    drafted = sum(count for name, count in stats.shapes.items() if not _without(name))
    total = sum(stats.shapes.values())
    if not drafted:
        return "no draft was verified. " + _why_off(stats)
    text = (
        f"{report.gain:.2f}x the speed that plain decoding is estimated at "
        f"(95 %: {report.low:.2f}x to {report.high:.2f}x)."
    )
    if report.high - report.low > TOO_WIDE * report.gain:
        measured = sum(times for _, nodes, _, times in report.verify if nodes == 1)
        text = (
            f"too short to tell what that gained: in {_count(total, 'step')}, with a plain step timed "
            f"{_count(measured, 'time')}, the times scatter too much."
        )
    return text if drafted * 2 >= total else f"{text} {_why_off(stats)}"


def _why_off(stats: SpeculationStats) -> str:
    """Why most steps had no draft."""
    names = stats.shapes
    total = sum(names.values()) or 1
    nothing = sum(count for name, count in names.items() if name.endswith("nothing proposed"))
    if nothing * 2 >= total:
        return "In most steps there was nothing to propose."
    report = stats.report
    assert report is not None
    if not report.acceptance:
        return "The call ended before anything was drafted."
    kind, (rates, _) = max(report.acceptance.items(), key=lambda item: item[1][1])
    return (
        f"Most steps were plain: of first tokens ({kind}) {rates[0]:.0%} are right, which does not pay for "
        "what drafting and a wider pass cost."
    )


def _without(name: str) -> bool:
    return name == "plain" or name.endswith(("dropped", "nothing proposed"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
