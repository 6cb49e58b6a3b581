"""``roll_out``: compare a candidate with a baseline in stages of more and more requests at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from specdec_ext.display import Summarised, Table
from specdec_ext.display.text import counted
from specdec_ext.evaluate.benchmark.prompts import Question
from specdec_ext.evaluate.benchmark.report import MOST_DIFFERENCES, Report
from specdec_ext.evaluate.benchmark.served import (
    ServedContestant,
    ServedSeries,
    UnansweredError,
    compare_contestants,
)
from specdec_ext.rollout import intervals
from specdec_ext.rollout.gates import (
    FAIL,
    HOLD,
    NO_FAILURES,
    OUTCOMES,
    PASS,
    Gate,
    Measured,
    Outcome,
    Verdict,
    worst,
)
from specdec_ext.rollout.intervals import Interval
from specdec_ext.rollout.lock import PairLock, ReferenceAcceptance
from specdec_ext.rollout.texts import ComparedTexts, compare_texts
from specdec_ext.stats import SpeculationStats

BASELINE, CANDIDATE = "baseline", "candidate"
# Largest share by which the speed of a server may change from turn to turn before it is told.
STEADY = 0.1
_MEANINGS = {
    PASS: "The candidate fulfils every gate in every stage.",
    HOLD: (
        "No gate has failed, but some are undecided: their bound is inside the interval of the measured "
        "number, or the number is not known. More prompts or repeats make intervals narrower."
    ),
    FAIL: "The candidate does not fulfil every gate.",
}


@dataclass(frozen=True)
class Stage:
    """The comparison with one number of requests at a time.

    Attributes:
        streams: number of requests at a time.
        verdicts: on each gate.
        report: everything that was measured; None if no prompt was answered by both.
        texts: the comparison of the texts; None without a report.
    """

    streams: int
    verdicts: tuple[Verdict, ...]
    report: Report | None = None
    texts: ComparedTexts | None = None

    @property
    def outcome(self) -> Outcome:
        return worst([verdict.outcome for verdict in self.verdicts])

    @property
    def series(self) -> list[ServedSeries]:
        """What baseline and candidate have answered; [] without a report."""
        report = self.report
        return [] if report is None else [_series(report, name) for name in (BASELINE, CANDIDATE)]

    def recommended(self, policy: str) -> str:
        """The value of ``speculation`` that is faster with so many rows, if the baseline has no drafts.

        Args:
            policy: the value that the candidate was measured with.
        """
        if not self.series:
            return ""
        baseline, candidate = self.series
        found = intervals.speedup(candidate, baseline)
        if found.low >= 1:
            return policy
        return "none" if found.high < 1 else f"{policy} or none: no difference was found"

    def record(self) -> dict[str, Any]:
        """The stage, for JSON."""
        return {
            "streams": self.streams,
            "outcome": self.outcome,
            "gates": [
                {
                    "gate": each.gate.name,
                    "outcome": each.outcome,
                    "value": _finite(each.measured.value),
                    "interval": [_finite(each.measured.low), _finite(each.measured.high)],
                    "note": each.measured.note,
                }
                for each in self.verdicts
            ],
            "texts": self.texts
            and {
                "summary": self.texts.summary(),
                "differences": self.texts.sentences(),
            },
            "report": self.report and self.report.record(),
        }


@dataclass(frozen=True, repr=False)
class Rollout(Summarised):
    """The result of :func:`roll_out`.

    Attributes:
        stages: those that were run.
        skipped: numbers of requests at a time of the stages that were not run, because one failed.
        policy: the value of ``speculation`` that the candidate was measured with; "" if it is not known.
        plain_baseline: whether the baseline is the candidate without drafts.
        sampling: with what the questions were asked.
    """

    stages: tuple[Stage, ...]
    skipped: tuple[int, ...] = ()
    policy: str = ""
    plain_baseline: bool = False
    sampling: Mapping[str, str | int | float | bool] | None = None

    @property
    def outcome(self) -> Outcome:
        return worst([stage.outcome for stage in self.stages])

    @property
    def exit_status(self) -> int:
        """0 for PASS, 1 for HOLD, 2 for FAIL."""
        return OUTCOMES.index(self.outcome)

    @property
    def reports(self) -> list[Report]:
        return [stage.report for stage in self.stages if stage.report is not None]

    @property
    def reference(self) -> ReferenceAcceptance | None:
        """The candidate's acceptance over all stages; None if it has not told its drafts."""
        series = [stage.series[-1] for stage in self.stages if stage.series]
        stats = [each for one in series for each in one.speculation_stats]
        if not stats:
            return None
        total = SpeculationStats()
        for each in stats:
            total.add(each)
        # The first token of a request comes from its prompt, and every step emits one token more than it
        # accepts.
        total.emitted_tokens = sum(
            reply.tokens - 1 for one in series for replies in one.replies for reply in replies
        )
        total.steps = max(total.drafts, total.emitted_tokens - total.accepted_tokens)
        return ReferenceAcceptance.of(total)

    def lock(self, pair: PairLock) -> PairLock:
        """The lock of the candidate's pair, with the acceptance that was measured."""
        return replace(pair, reference=self.reference, sampling=dict(self.sampling or {}))

    def summary(self) -> str:
        if self.outcome == PASS:
            numbers = ", ".join(str(stage.streams) for stage in self.stages)
            return f"PASS: every gate, streams {numbers}"
        causes = [
            f"{verdict.gate.name} with {counted(stage.streams, 'stream')}"
            for stage in self.stages
            for verdict in stage.verdicts
            if verdict.outcome == self.outcome
        ]
        return f"{self.outcome}: {', '.join(causes)}"

    def sentences(self) -> Iterable[str]:
        yield _MEANINGS[self.outcome]
        for stage in self.stages:
            for verdict in stage.verdicts:
                if verdict.outcome != PASS:
                    yield f"{counted(stage.streams, 'stream')}: {verdict.summary()}"
            yield from _notes(stage)
        if self.skipped:
            yield f"Not run after that: stages with {', '.join(map(str, self.skipped))} streams."

    def tables(self) -> list[Table]:
        rows = [
            (
                str(stage.streams) if number == 0 else "",
                verdict.gate.name,
                verdict.shown,
                verdict.outcome,
            )
            for stage in self.stages
            for number, verdict in enumerate(stage.verdicts)
        ]
        marked = [number for number, row in enumerate(rows) if row[-1] != PASS]
        tables = [Table(rows, ("streams", "gate", "measured [95 %]", ""), marked=marked)]
        if self.plain_baseline:
            best = [(str(each.streams), each.recommended(self.policy)) for each in self.stages]
            tables.append(Table(best, ("rows", "recommended speculation")))
        return tables

    def record(self) -> dict[str, Any]:
        """The whole result, for JSON."""
        return {
            "outcome": self.outcome,
            "summary": self.summary(),
            "policy": self.policy,
            "skipped": list(self.skipped),
            "reference": self.reference and self.reference.record(),
            "stages": [stage.record() for stage in self.stages],
        }


def _notes(stage: Stage) -> Iterable[str]:
    """What else must be known about a stage: speeds that change from turn to turn, texts that differ."""
    where = counted(stage.streams, "stream")
    for series in stage.series:
        slowest, fastest = min(series.throughput), max(series.throughput)
        if slowest and fastest > (1 + STEADY) * slowest:
            yield (
                f"{where}: the {series.name} was up to {fastest / slowest - 1:.0%} faster in one turn than "
                f"in another. The intervals contain what {counted(len(series.throughput), 'turn')} tell of "
                "that; take an idle machine, or more --repeats"
            )
    if stage.texts is not None and stage.texts.verdicts:
        yield f"{where}: texts: {stage.texts.summary()}"
        told = stage.texts.sentences()
        yield from told[:MOST_DIFFERENCES]
        if more := len(told[MOST_DIFFERENCES:]):
            yield f"and {counted(more, 'further text')}"


def roll_out(
    baseline: ServedContestant,
    candidate: ServedContestant,
    asked: Sequence[Question],
    gates: Sequence[Gate],
    *,
    streams: Sequence[int] = (1,),
    max_new_tokens: int = 128,
    repeats: int = 5,
    temperature: float = 0.0,
    policy: str = "",
) -> Rollout:
    """Measure stage after stage, in which the two take turns, and stop at the first one that fails.

    Args:
        baseline, candidate: servers and the fields of their requests.
        asked: what both answer in each turn.
        gates: from :func:`specdec_ext.rollout.gates.parse_gates`.
        streams: numbers of requests at a time, one per stage.
        max_new_tokens: most tokens of an answer.
        repeats: turns of each of the two in a stage.
        temperature: of the sampling; 0 is greedy.
        policy: see :class:`Rollout`.
    """
    contestants = {BASELINE: baseline, CANDIDATE: candidate}
    stages: list[Stage] = []
    for number in streams:
        try:
            (report,) = compare_contestants(
                contestants,
                asked,
                plain=None,
                streams=[number],
                temperatures=[temperature],
                max_new_tokens=max_new_tokens,
                repeats=repeats,
            )
        except UnansweredError as error:
            stages.append(_unanswered(number, error))
        else:
            series = _series(report, BASELINE), _series(report, CANDIDATE)
            texts = compare_texts(*series, contestants, asked, max_new_tokens, temperature)
            verdicts = tuple(gate.judge(Measured(*series, texts)) for gate in gates)
            stages.append(Stage(number, verdicts, report, texts))
        if stages[-1].outcome == FAIL:
            break
    return Rollout(
        tuple(stages),
        tuple(streams[len(stages) :]),
        policy,
        baseline.server is candidate.server,
        {"temperature": temperature, "max_new_tokens": max_new_tokens, "prompts": len(asked)},
    )


def _unanswered(streams: int, error: UnansweredError) -> Stage:
    """A stage in which no prompt was answered by both; it says nothing if the baseline fails, too."""
    outcome = HOLD if BASELINE in error.failing else FAIL
    return Stage(streams, (Verdict(NO_FAILURES, Interval.unknown(str(error)), outcome),))


def _series(report: Report, name: str) -> ServedSeries:
    return cast(ServedSeries, report.series[name])


def _finite(value: float) -> float | None:
    """The number, or None for one that JSON does not have."""
    return value if abs(value) < float("inf") else None
