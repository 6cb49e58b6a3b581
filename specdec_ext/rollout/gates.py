"""Gates: what a candidate must fulfil, such as ``speedup>=1.1``, and the verdicts on them.

A gate passes if the whole interval of the measured number fulfils it, fails if no part of the interval does,
and holds in between: more prompts would decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec_ext.display.text import did_you_mean
from specdec_ext.evaluate.benchmark import latency
from specdec_ext.evaluate.benchmark.served import ServedSeries
from specdec_ext.rollout import intervals
from specdec_ext.rollout.intervals import Interval
from specdec_ext.rollout.texts import ComparedTexts

Outcome = Literal["PASS", "HOLD", "FAIL"]
PASS: Outcome = "PASS"
HOLD: Outcome = "HOLD"
FAIL: Outcome = "FAIL"
OUTCOMES = (PASS, HOLD, FAIL)  # their place is the exit status
DEFAULT_GATES = "speedup>=1.1,p99_itl<=1.05x,equal>=1.0"

RATIO, MILLISECONDS = "x", "ms"
_LATENCIES = {
    f"p{share}_{metric}": (metric, share)
    for metric in latency.METRICS
    for share in latency.PERCENTILES
}
_SHARES = ("equal", "failed")
METRICS = ("speedup", "acceptance", *_SHARES, *_LATENCIES)
_LARGER_IS_BETTER = ("speedup", "acceptance", "equal")
# Metric -> the units that its bound may have.
_UNITS: dict[str, tuple[str, ...]] = {
    "speedup": ("", RATIO),
    "acceptance": ("", RATIO),
    **{name: ("",) for name in _SHARES},
    **{name: (RATIO, MILLISECONDS) for name in _LATENCIES},
}
_FORM = re.compile(r"(\w+)\s*(>=|<=)\s*(\d{1,9}(?:\.\d{0,9})?)\s*(x|ms)?")


@dataclass(frozen=True)
class Measured:
    """What gates are judged by.

    Attributes:
        baseline, candidate: what the two have answered, the same questions.
        texts: the comparison of their texts.
    """

    baseline: ServedSeries
    candidate: ServedSeries
    texts: ComparedTexts


@dataclass(frozen=True)
class Gate:
    """A bound on a metric.

    Attributes:
        metric: a name of ``METRICS``.
        bound: the smallest value that passes if larger ones are better, else the largest.
        unit: ``"x"`` for a ratio to the baseline, ``"ms"``, or ``""``.
    """

    metric: str
    bound: float
    unit: str = ""

    @property
    def at_least(self) -> bool:
        """Whether larger values are better."""
        return self.metric in _LARGER_IS_BETTER

    @property
    def name(self) -> str:
        """The gate as it is written."""
        return f"{self.metric}{'>=' if self.at_least else '<='}{self.bound:g}{self.unit}"

    @property
    def needs_baseline_drafts(self) -> bool:
        return self.metric == "acceptance" and self.unit == RATIO

    def judge(self, measured: Measured) -> Verdict:
        """The verdict on what was measured."""
        found = self._measure(measured)
        inside = (found.low >= self.bound, found.high >= self.bound)
        if not self.at_least:
            inside = (found.low <= self.bound, found.high <= self.bound)
        return Verdict(self, found, PASS if all(inside) else HOLD if any(inside) else FAIL)

    def _measure(self, measured: Measured) -> Interval:
        candidate, baseline = measured.candidate, measured.baseline
        compared = baseline if self.unit == RATIO else None
        if self.metric == "speedup":
            return intervals.speedup(candidate, baseline)
        if self.metric == "acceptance":
            return intervals.acceptance(candidate, compared)
        if self.metric == "equal":
            return measured.texts.equal
        if self.metric == "failed":
            return Interval.exact(len(candidate.failures) / candidate.requests)
        metric, share = _LATENCIES[self.metric]
        return intervals.percentile(metric, share, candidate, compared)


# Requests that fail are left out of all other numbers, so this gate always takes part.
NO_FAILURES = Gate("failed", 0.0)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a gate in a stage.

    Attributes:
        gate: the gate.
        measured: the number that it bounds.
        outcome: ``"PASS"``, ``"HOLD"`` or ``"FAIL"``.
    """

    gate: Gate
    measured: Interval
    outcome: Outcome

    def summary(self) -> str:
        """The verdict in words, such as ``"speedup>=1.1 FAIL: 0.98 [0.95, 1.01]"``."""
        return f"{self.gate.name} {self.outcome}: {self.shown}"

    @property
    def shown(self) -> str:
        """The measured number with its interval, or why it is not known."""
        found = self.measured
        if found.note:
            value = "" if found.value != found.value else f"{found.value:.3g}{self.gate.unit}, "
            return f"{value}{found.note}"
        if found.low == found.high:
            return f"{found.value:.4g}{self.gate.unit}"
        return f"{found.value:.3g}{self.gate.unit} [{found.low:.3g}, {found.high:.3g}]"


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst of outcomes; PASS without any."""
    return max(outcomes, key=OUTCOMES.index, default=PASS)


def parse_gates(text: str) -> list[Gate]:
    """The gates of ``--gate``, with commas between them; ``failed<=0`` is added if it is not bounded.

    Raises:
        ValueError: for an unknown metric, a bound that can't be, or a gate that is given twice.
    """
    parts = [each.strip() for each in text.split(",")]
    if not any(parts):
        raise ValueError(f"--gate is empty; expected gates such as {DEFAULT_GATES}")
    gates = [_parsed(part) for part in parts]
    kinds = [(gate.metric, gate.unit) for gate in gates]
    for gate, kind in zip(gates, kinds, strict=True):
        if kinds.count(kind) > 1:
            raise ValueError(f"--gate bounds {gate.metric} twice; leave one of the two out")
    if NO_FAILURES.metric not in (gate.metric for gate in gates):
        gates.append(NO_FAILURES)
    return gates


def _parsed(part: str) -> Gate:
    found = _FORM.fullmatch(part)
    if found is None:
        raise ValueError(
            f"--gate {part!r}: expected METRIC>=NUMBER or METRIC<=NUMBER, with x after a ratio to the "
            f"baseline or ms, such as {DEFAULT_GATES}"
        )
    metric, sign, number, unit = (
        found.group(1),
        found.group(2),
        found.group(3),
        found.group(4) or "",
    )
    if metric not in METRICS:
        meant = did_you_mean(metric, METRICS)
        raise ValueError(
            f"--gate {part}: {metric!r} is not known{meant}; metrics are {', '.join(METRICS)}"
        )
    if unit not in _UNITS[metric]:
        allowed = " or ".join(each or "no unit" for each in _UNITS[metric])
        given = f"the unit {unit}" if unit else "no unit"
        raise ValueError(
            f"--gate {part}: a bound of {metric} has {allowed} (x: ratio to the baseline, ms: milliseconds), "
            f"got {given}"
        )
    gate = Gate(metric, float(number), "" if metric == "speedup" else unit)
    if (sign == ">=") != gate.at_least:
        better = "larger" if gate.at_least else "smaller"
        raise ValueError(f"--gate {part}: {better} is better here; expected {gate.name}")
    if metric in _SHARES and gate.bound > 1:
        raise ValueError(f"--gate {part}: {metric} is a share; expected a number from 0 to 1")
    return gate
