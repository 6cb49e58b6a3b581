"""``Report``: what was seen of a server, in tables of 80 columns, as one line and for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec_ext.display import Summarised, Table
from specdec_ext.display.text import counted
from specdec_ext.serve import names
from specdec_ext.watch.history import Growth
from specdec_ext.watch.judge import PositionAcceptance, State, Verdict, worst

# The exit status of ``specdec watch``; 2 is that of a wrong call, as for all commands.
STATUS: dict[State, int] = {"well": 0, "unknown": 0, "warning": 1, "critical": 3}


@dataclass(repr=False)
class Report(Summarised):
    """What was seen of a server.

    Attributes:
        url: its address.
        verdicts: the results of all checks that were possible.
        model: name of its model; "" if it has never answered.
        growth: what it counted in the window; None if there is nothing to compare yet.
        recent: the same since the last look; None for a single look.
        gauges: its gauges at the last look.
        positions: the acceptance of each position in the window.
        restarts: how often it was started again while it was watched.
    """

    url: str
    verdicts: list[Verdict]
    model: str = ""
    growth: Growth | None = None
    recent: Growth | None = None
    gauges: dict[str, float] = field(default_factory=dict)
    positions: Sequence[PositionAcceptance] = ()
    restarts: int = 0

    @property
    def status(self) -> int:
        """The exit status: 0 if nothing is wrong, 1 for a warning, 3 if something is broken."""
        return STATUS[worst(self.verdicts)]

    def summary(self) -> str:
        wrong = [each for each in self.verdicts if each.state in ("warning", "critical")]
        if wrong:
            return "; ".join(f"{each.check} {each.state}: {each.reason}" for each in wrong)
        numbers = []
        if self.growth is not None:
            numbers = [
                f"{text} {what}"
                for what, text in (
                    ("tokens/s", _number(self.growth.tokens_per_second, ".0f")),
                    ("tokens per draft", _number(self.growth.acceptance_length, ".2f")),
                    ("plain decoding", _number(self.growth.gain, ".2fx")),
                )
                if text
            ]
        return ", ".join(["well", *numbers, *self._not_judged()])

    def _not_judged(self) -> Iterable[str]:
        unknown = [each.check for each in self.verdicts if each.state == "unknown"]
        if unknown:
            yield f"not judged: {' '.join(unknown)}"

    def tables(self) -> Iterable[Table]:
        title = f"{self.url} {self.model}".strip()
        if self.restarts:
            title += f", started again {counted(self.restarts, 'time')}"
        marked = [
            i for i, each in enumerate(self.verdicts) if each.state not in ("well", "unknown")
        ]
        rows = [(each.check, each.state, each.reason) for each in self.verdicts]
        yield Table(rows, ("check", "state", "why"), title, marked)
        if self.growth is not None:
            yield self._numbers(self.growth)
        if any(each.reached for each in self.positions):
            yield self._acceptance()

    def _numbers(self, growth: Growth) -> Table:
        spans = [growth] if self.recent is None else [growth, self.recent]
        rows = [
            ("tokens/s", *(_number(each.tokens_per_second, ".1f") for each in spans)),
            ("drafts", *(f"{each.count(names.DRAFTS):,.0f}" for each in spans)),
            ("tokens per draft", *(_number(each.acceptance_length, ".2f") for each in spans)),
            ("tokens per step", *(_number(each.tokens_per_step, ".2f") for each in spans)),
            ("speed, plain = 1", *(_number(each.gain, ".2fx") for each in spans)),
            *(
                (f"{what} p{percent}, ms", *(_milliseconds(each, name, percent) for each in spans))
                for what, name in (
                    ("first token", names.TIME_TO_FIRST_TOKEN),
                    ("token", names.INTER_TOKEN_LATENCY),
                )
                for percent in (50, 99)
            ),
        ]
        for what, name in (("running", names.RUNNING), ("waiting", names.WAITING)):
            if name in self.gauges:
                now = f"{self.gauges[name]:.0f}"
                rows.append((what, now) if self.recent is None else (what, "", now))
        known = [row for row in rows if any(row[1:])]
        return Table(known, ("", *map(_span, spans)))

    def _acceptance(self) -> Table:
        rows = [
            (
                str(each.position),
                f"{each.reached:,.0f}",
                _number(each.acceptance, ".3f"),
                _number(each.reference, ".3f"),
                _number(each.change, "+.3f"),
                _number(each.error, ".3f"),
            )
            for each in self.positions
            if each.reached or each.reference is not None
        ]
        title = "acceptance of each position, given that the one before was accepted"
        headings = ("position", "drafts", "accepted", "reference", "change", "std. error")
        return Table(rows, headings, title)

    def record(self) -> dict[str, Any]:
        """Everything, for JSON; numbers that are not known are None."""
        return {
            "url": self.url,
            "model": self.model,
            "status": self.status,
            "restarts": self.restarts,
            "verdicts": [asdict(each) for each in self.verdicts],
            "running": self.gauges.get(names.RUNNING),
            "waiting": self.gauges.get(names.WAITING),
            "window": self.growth and _record(self.growth),
            "recent": self.recent and _record(self.recent),
            "positions": [
                {**asdict(each), "acceptance": each.acceptance} for each in self.positions
            ],
        }


def _record(growth: Growth) -> dict[str, Any]:
    return {
        "seconds": growth.seconds,
        "tokens": growth.count(names.GENERATION_TOKENS),
        "drafts": growth.count(names.DRAFTS),
        "tokens_per_second": growth.tokens_per_second,
        "acceptance_length": growth.acceptance_length,
        "tokens_per_step": growth.tokens_per_step,
        "gain": growth.gain,
        **{
            f"{what}_p{percent}": growth.quantile(name, percent / 100)
            for what, name in (
                ("time_to_first_token", names.TIME_TO_FIRST_TOKEN),
                ("inter_token_latency", names.INTER_TOKEN_LATENCY),
            )
            for percent in (50, 99)
        },
    }


def _number(value: float | None, form: str) -> str:
    """A number in a format that may end with a unit; "" if it is not known."""
    if value is None or not math.isfinite(value):
        return ""
    digits = form.rstrip("x")
    return f"{value:{digits}}{form[len(digits) :]}"


def _milliseconds(growth: Growth, name: str, percent: int) -> str:
    seconds = growth.quantile(name, percent / 100)
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _span(growth: Growth) -> str:
    return "since start" if growth.seconds is None else f"last {growth.seconds:.0f} s"
