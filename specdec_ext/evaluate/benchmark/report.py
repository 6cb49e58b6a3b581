"""``Report``: the results of a comparison as tables, as JSON and as a bar chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import tracked
from specdec_ext.evaluate.benchmark import latency
from specdec_ext.evaluate.benchmark.series import Series
from specdec_ext.evaluate.compare import ComparedRuns
from specdec_ext.evaluate.speedup import bootstrap

BAR_WIDTH = 20
MIB = 1 << 20


@dataclass(repr=False)
class Report(Summarised):
    """Results of all contestants in one run.

    Attributes:
        machine: see :func:`machine_line`.
        settings: the settings of the run.
        series: results by contestant.
        baseline, plain: names of the contestants that ratios are relative to; ``plain`` decodes one token at
            a time through our loop.
        same_text: for each contestant, how many of its texts equal the baseline's, in words.
        left_out: contestant that could not take part -> reason.
    """

    machine: str
    settings: dict[str, Any]
    series: dict[str, Series]
    baseline: str
    plain: str | None = None
    same_text: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    @property
    def unique_4grams(self) -> float:
        return self.series[self.baseline].unique_4grams

    def summary(self) -> str:
        rows = [row for row in self.rows() if row["name"] != self.baseline]
        if not rows:
            return f"only {self.baseline}, nothing to compare"
        best = max(rows, key=lambda row: row["ratio"])
        return (
            f"{best['name']} is the fastest of {len(self.series)}: {best['ratio']:.2f}x {self.baseline}, "
            f"95 % [{best['interval'][0]:.2f}, {best['interval'][1]:.2f}]; {self.title}"
        )

    def sentences(self) -> Iterable[str]:
        yield f"{self.summary()}."
        yield self.machine
        yield (
            "A ratio compares medians over prompts; the interval says how far it depends on the prompts. "
            "Speculation pays where more tokens are emitted per step than break-even."
        )
        yield from self.notes()

    def rows(self) -> list[dict[str, Any]]:
        """One record per contestant, for JSON."""
        return [self._row(series) for series in self.series.values()]

    def record(self) -> dict[str, Any]:
        """The whole report, for JSON."""
        return {
            "machine": self.machine,
            "settings": self.settings,
            "baseline": self.baseline,
            "unique_4gram_fraction": self.unique_4grams,
            "left_out": self.left_out,
            "rows": self.rows(),
        }

    def tables(self) -> list[Table]:
        """Tables of speed (95 % intervals over prompts), drafts, and latency if measured; 80 columns wide."""
        rows = self.rows()
        speed = [
            (
                row["name"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['ratio']:.2f}x [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]",
                _number(row["ratio_to_plain"], "x"),
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:.0f}",
            )
            for row in rows
        ]
        drafts = [
            (
                row["name"],
                row["policy"],
                _number(row["fixed_acceptance_length"] or row["mean_acceptance_length"]),
                _number(row["emitted_per_step"]),
                _number(row["break_even"]),
                row["same_text"],
            )
            for row in rows
        ]
        arrivals = [
            (row["name"], *(f"{value:.2f}" for value in row["milliseconds"].values()))
            for row in rows
            if row["milliseconds"]
        ]
        headings = {
            "speed": ("", "tokens/s", "ratio [95 %]", "to plain", "peak MiB"),
            "drafts": ("", "policy", "accepted", "emitted", "break-even", "same text"),
            "arrivals": ("milliseconds", "to first", "per token", "gap p50", "p90", "p99"),
        }
        tables = [Table(speed, headings["speed"], self.title), Table(drafts, headings["drafts"])]
        return [*tables, *([Table(arrivals, headings["arrivals"])] if arrivals else [])]

    def notes(self) -> list[str]:
        """Explanations of the tables, and the contestants that were left out."""
        columns = (
            "policy: how the timed calls decided what to draft. accepted: mean acceptance length, bonus "
            'token included, measured with drafts in every step ("fixed"): under "auto" each drafter drafts '
            "in different steps, so their lengths can't be compared. emitted: tokens per step of the timed "
            "calls. gap: time between two arrivals of tokens in a stream"
        )
        left_out = (f"{name}: left out, {why}" for name, why in self.left_out.items())
        return [
            repetition_note(self.series[self.baseline]),
            *([columns] if any(row["policy"] for row in self.rows()) else []),
            *left_out,
        ]

    def _row(self, series: Series) -> dict[str, Any]:
        baseline = self.series[self.baseline]
        plain = self.series.get(self.plain) if self.plain else None
        speedup = series.speedup(baseline)
        rates = series.tokens_per_second
        return {
            "name": series.name,
            "tokens_per_second": series.median_tokens_per_second,
            "ratio": speedup.value,
            "interval": [speedup.low, speedup.high],
            "ratio_of_means": bootstrap(rates, baseline.tokens_per_second, np.mean).value,
            "ratio_to_plain": plain and series.speedup(plain).value,
            "policy": series.policy,
            "mean_acceptance_length": series.mean_acceptance_length,
            "fixed_acceptance_length": series.fixed_acceptance_length,
            "emitted_per_step": series.emitted_per_step,
            "acceptance_per_position": series.acceptance_per_position,
            "milliseconds_per_step": series.milliseconds_per_step,
            "break_even": plain and series.break_even(plain),
            "milliseconds": latency.summary(series.latencies),
            "peak_bytes": series.peak,
            "same_text": self.same_text.get(series.name, ""),
            "tokens_per_second_by_prompt": rates,
        }


def repetition_note(series: Series) -> str:
    """How much the completions repeat themselves, in words."""
    return (
        f"unique 4-grams in the completions: {series.unique_4grams:.0%} "
        "(text that repeats itself is easy to guess and inflates ratios)"
    )


def position_table(series: Series) -> Table:
    """Table of acceptance by position in the draft."""
    proposed = series.total_per_position("proposed_per_position")
    accepted = series.total_per_position("accepted_per_position")
    drafts = series.total("drafts")
    rows = [
        (
            str(position),
            str(tried),
            str(kept),
            f"{kept / drafts:.0%}",
            f"{kept / tried:4.0%} {'█' * round(BAR_WIDTH * kept / tried)}",
        )
        for position, (tried, kept) in enumerate(zip(proposed, accepted, strict=True), start=1)
    ]
    headings = "position", "drafted", "accepted", "of all drafts", "of those drafted"
    return Table(rows, headings, f"acceptance by position in the draft, {series.name}")


def plot(reports: Sequence[Report], path: Path) -> None:
    """Plot tokens per second as bars, one panel per report; whiskers are the intervals of the ratios."""
    from matplotlib.figure import Figure

    sizes = [len(report.series) for report in reports]
    figure = Figure(figsize=(9, 0.42 * sum(sizes) + 0.9 * len(reports) + 0.4))
    panels = figure.subplots(len(reports), height_ratios=sizes, squeeze=False)
    for axes, report in zip(panels[:, 0], reports, strict=True):
        rows = report.rows()
        base = report.series[report.baseline].median_tokens_per_second
        rates = [row["tokens_per_second"] for row in rows]
        low, high = (
            [abs(base * row["interval"][end] - rate) for row, rate in zip(rows, rates, strict=True)]
            for end in (0, 1)
        )
        bars = axes.barh(
            [row["name"] for row in rows],
            rates,
            xerr=[low, high],
            error_kw={"elinewidth": 0.8, "ecolor": "#5f6368"},
            color=[
                "#1a73e8" if each.speculation_stats else "#9aa0a6"
                for each in report.series.values()
            ],
        )
        axes.bar_label(bars, [f"{row['ratio']:.2f}x" for row in rows], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(report.title, fontsize=7, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("tokens per second, median over prompts", fontsize=8)
    figure.suptitle(reports[0].machine, fontsize=6, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def same_text(compared: Sequence[ComparedRuns]) -> str:
    """How many texts are equal, and the verdicts on the others, such as ``"8/10, 2 near-ties"``."""
    verdicts = [each.verdict for each in compared]
    summary = f"{verdicts.count('equal')}/{len(verdicts)}"
    for verdict in ("near-tie", "bug"):
        if count := verdicts.count(verdict):
            summary += f", {count} {verdict}" + ("s" if count > 1 else "")
    return summary


def same_texts(
    series: Mapping[str, Series], baseline: str, plain: str | None, model: Any, sampled: bool
) -> dict[str, str]:
    """For each contestant, how many of its texts are equal to the expected ones.

    Greedy texts are compared with the baseline's. Sampled texts of our contestants are compared with those of
    plain decoding: transformers samples different texts from the same distribution.
    """
    if not sampled:
        others = {name: each for name, each in series.items() if name != baseline}
        compared = {}
        with tracked("comparing the texts", len(others), "contestant") as work:
            for name, each in others.items():
                compared[name] = same_text(each.compared_to(series[baseline], model))
                work.advance()
        return compared
    if plain is None:
        return {}
    equal = {
        name: each.equals(series[plain])
        for name, each in series.items()
        if each.speculation_stats and name != plain
    }
    return {name: f"{sum(each)}/{len(each)} of {plain}" for name, each in equal.items()}


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"
