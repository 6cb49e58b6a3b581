"""``Report``: the results of a comparison as tables, as a record for JSON and as a bar chart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import tracked
from specdec_ext.display.text import counted, one_line, printable
from specdec_ext.evaluate.benchmark import latency
from specdec_ext.evaluate.benchmark.series import Series
from specdec_ext.evaluate.compare import ComparedRuns
from specdec_ext.evaluate.speedup import bootstrap
from specdec_ext.preflight.extras import require

BAR_WIDTH = 20
MOST_DIFFERENCES = 5  # that are shown; files have all
MAX_ERROR = 400  # characters of an error's message
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
        same_text: for each contestant, how many of its texts equal the expected ones, in words.
        expected: the contestant that has the expected texts.
        differences: a sentence for each text that differs.
        left_out: contestant that could not take part -> reason.
        errors: contestant that raised an error, and has no results -> the error.
        is_interrupted: whether the run was interrupted, so that not everything was measured.
        categories: the category of each prompt; () if none has one.
        remarks: what else must be known about the run.
    """

    machine: str
    settings: dict[str, Any]
    series: dict[str, Series]
    baseline: str
    plain: str | None = None
    same_text: dict[str, str] = field(default_factory=dict)
    expected: str = ""
    differences: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False
    categories: Sequence[str] = ()
    remarks: list[str] = field(default_factory=list)

    @property
    def reference(self) -> str:
        """The contestant that ratios of the overview are relative to: plain decoding, if it takes part."""
        return self.plain or self.baseline

    @property
    def title(self) -> str:
        parts = (
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.settings.items()
        )
        return ", ".join(parts)

    @property
    def unique_4grams(self) -> float | None:
        """``Series.unique_4grams`` of the baseline; None if nothing was measured."""
        return self.series[self.baseline].unique_4grams if self.series else None

    @property
    def is_whole(self) -> bool:
        """Whether everything was measured that was asked for."""
        return not (self.errors or self.is_interrupted)

    def interrupt(self, where: str) -> None:
        """Note that the run was interrupted."""
        self.is_interrupted = True
        self.remarks.append(f"interrupted {where}")

    def summary(self) -> str:
        if not self.series:
            return f"all of {', '.join(self.errors)} failed; {self.title}"
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
            "`details()` has tables of everything else that was measured."
        )
        yield from self.notes()

    def rows(self) -> list[dict[str, Any]]:
        """One record per contestant that was measured."""
        return [self._row(series) for series in self.series.values()]

    def all_rows(self) -> list[dict[str, Any]]:
        """:meth:`rows`, and one with a name and the error for each contestant that failed."""
        failed = [{"name": name, "error": error} for name, error in self.errors.items()]
        return [*self.rows(), *failed]

    def record(self) -> dict[str, Any]:
        """The whole report, for JSON."""
        return {
            "machine": self.machine,
            "settings": self.settings,
            "baseline": self.baseline,
            "unique_4gram_fraction": self.unique_4grams,
            "left_out": self.left_out,
            "errors": self.errors,
            "is_interrupted": self.is_interrupted,
            "differences": self.differences,
            "remarks": self.remarks,
            "rows": self.all_rows(),
            "categories": self.by_category(),
        }

    def tables(self) -> list[Table]:
        """The overview in one table: speed with its interval over prompts, acceptance, latency."""
        rows = []
        for series in self.series.values():
            row, ratio = self._row(series), series.speedup(self.series[self.reference])
            rows.append(
                (
                    series.name,
                    f"{row['tokens_per_second']:.1f}",
                    f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]",
                    _number(row["fixed_acceptance_length"] or row["mean_acceptance_length"]),
                    *(
                        _milliseconds(row["milliseconds"].get(metric, {}).get(share))
                        for metric, share in (("ttft", "p50"), ("tpot", "p50"), ("itl", "p99"))
                    ),
                    "" if not row["failed"] else str(row["failed"]),
                )
            )
        rows += [
            (name, "", "", "", "", "", "", error.partition(":")[0])
            for name, error in self.errors.items()
        ]
        headings = ("", "tokens/s", "ratio [95 %]", "accepted", "TTFT", "TPOT", "ITL p99", "failed")
        title = (
            f"{self.title}; ratio to {self.reference}; times in ms, of TTFT and TPOT the medians"
            if self.series
            else self.title
        )
        return [_table(rows, headings, title)]

    def details(self) -> list[Table]:
        """Tables of everything else that was measured; 80 columns wide."""
        if not self.series:
            return []
        return [
            *self._speeds(),
            *self._latencies(),
            *self._by_category(),
            *(
                position_table(each)
                for each in self.series.values()
                if each.total_per_position("accepted_per_position")
            ),
        ]

    def _speeds(self) -> list[Table]:
        rows = self.rows()
        ratio = f"to {self.baseline} [95 %]" if self.baseline != self.reference else ""
        speed = [
            (
                row["name"],
                _number(row["prompt_tokens_per_second"], digits=1),
                _number(row["generated_per_second"], digits=1),
                _number(row.get("throughput"), digits=1),
                ratio
                and f"{row['ratio']:.2f}x [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:.0f}",
            )
            for row in rows
        ]
        drafts = [
            (
                row["name"],
                row["policy"],
                _number(row["emitted_per_step"]),
                _number(row["break_even"]),
                row["same_text"],
            )
            for row in rows
        ]
        headings = {
            "speed": ("", "prompt", "generation", "throughput", ratio, "peak MiB"),
            "drafts": ("", "policy", "emitted", "break-even", "same text"),
        }
        return [
            _table(speed, headings["speed"], "tokens/s of prompt and generation apart"),
            _table(drafts, headings["drafts"]),
        ]

    def _latencies(self) -> list[Table]:
        rows = []
        for row in self.rows():
            name = row["name"]
            for metric, shares in row["milliseconds"].items():
                cells = (f"{value:.2f}" for value in shares.values())
                rows.append((name, latency.METRICS[metric], *cells))
                name = ""
        shares = [f"p{share}" for share in latency.PERCENTILES]
        return [Table(rows, ("", "milliseconds", *shares), "latency")] if rows else []

    def _by_category(self) -> list[Table]:
        rows = [
            (
                row["category"] if number == 0 else "",
                str(row["prompts"]) if number == 0 else "",
                name,
                f"{each['tokens_per_second']:.1f}",
                f"{each['ratio']:.2f}x",
                _number(each["acceptance_length"]),
            )
            for row in self.by_category()
            for number, (name, each) in enumerate(row["contestants"].items())
        ]
        headings = ("category", "prompts", "", "tokens/s", "ratio", "accepted")
        title = f"by category, ratio to {self.reference}"
        return [Table(rows, headings, title)] if rows else []

    def by_category(self) -> list[dict[str, Any]]:
        """One record per category, for JSON; empty if there are no categories."""
        records = []
        for category in dict.fromkeys(self.categories):
            places = [place for place, each in enumerate(self.categories) if each == category]
            series = {name: each.only(places) for name, each in self.series.items()}
            contestants = {
                name: {
                    "tokens_per_second": each.median_tokens_per_second,
                    "ratio": each.speedup(series[self.reference]).value,
                    "acceptance_length": each.fixed_acceptance_length
                    or each.mean_acceptance_length,
                }
                for name, each in series.items()
            }
            records.append(
                {"category": category, "prompts": len(places), "contestants": contestants}
            )
        return records

    def notes(self) -> list[str]:
        """Texts that differ, failures, contestants that were left out, and explanations of the tables."""
        notes = [f"{name}: failed, {error}" for name, error in self.errors.items()]
        notes += [f"{name}: left out, {why}" for name, why in self.left_out.items()]
        for name, series in self.series.items():
            for why, times in Counter(series.failures).most_common():
                notes.append(f"{name}: {counted(times, 'request')} failed, {why}")
        shown = self.differences[:MOST_DIFFERENCES]
        if more := len(self.differences) - len(shown):
            shown.append(f"and {counted(more, 'further text')}; a JSON file has all of them")
        if found := set(self.same_text.values()):
            told = f"{next(iter(found))} for every contestant"
            if len(found) > 1:
                told = ", ".join(f"{name} {same}" for name, same in self.same_text.items())
            notes.append(f"same text as {self.expected}: {told}")
        notes += [*shown, *self.remarks]
        if self.series:
            notes.append(repetition_note(self.series[self.reference]))
        if any(series.latencies for series in self.series.values()):
            notes.append(
                "TTFT: time to the first token. TPOT: time per further token, the mean of a request. ITL: "
                "the time before a chunk divided among its tokens. Chunk gap: time between two arrivals"
            )
        if any(row["policy"] for row in self.rows()):
            notes.append(
                "accepted: mean acceptance length, bonus token included, with drafts in every step "
                '("fixed"): under "auto" each drafter drafts in different steps, so their lengths can\'t be '
                "compared. emitted: tokens per step of the timed calls"
            )
        return notes

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
            "prompt_tokens_per_second": series.prompt_tokens_per_second,
            "generated_per_second": series.generated_per_second,
            "failed": len(series.failures),
            "failures": dict(Counter(series.failures)),
            "tokens_per_second_by_prompt": rates,
            "first_token_seconds_by_request": [each.first for each in series.latencies],
            "seconds_per_token_by_request": [each.per_token for each in series.latencies],
            **series.more(),
        }


def joint_notes(reports: Sequence[Report]) -> list[str]:
    """The notes of several reports, each once; those of some reports only begin with their titles."""
    notes = [report.notes() for report in reports]
    common = [note for note in notes[0] if all(note in each for each in notes)]
    own = [
        f"{report.title}: {note}"
        for report, each in zip(reports, notes, strict=True)
        for note in each
        if note not in common
    ]
    return [*own, *common]


def told_error(error: Exception) -> str:
    """The kind of an error and its message, in one line."""
    return f"{type(error).__name__}: {one_line(str(error))[:MAX_ERROR]}"


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
    title = f"acceptance by position in the draft, {series.name}"
    if not proposed:  # a server tells how many were accepted only
        told = [
            (str(position), str(kept), f"{kept / drafts:4.0%} {_bar(kept / drafts)}")
            for position, kept in enumerate(accepted, start=1)
        ]
        return Table(told, ("position", "accepted", "of all drafts"), title)
    rows = [
        (
            str(position),
            str(tried),
            str(kept),
            f"{kept / drafts:.0%}",
            f"{kept / tried:4.0%} {_bar(kept / tried)}",
        )
        for position, (tried, kept) in enumerate(zip(proposed, accepted, strict=True), start=1)
    ]
    headings = "position", "drafted", "accepted", "of all drafts", "of those drafted"
    return Table(rows, headings, title)


def _bar(share: float) -> str:
    return "█" * round(BAR_WIDTH * share)


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw :func:`figure` to a file."""
    figure(reports).savefig(path, dpi=120)


def figure(reports: Sequence[Report]) -> Any:
    """Tokens per second as bars, one panel per report; whiskers are the intervals of the ratios.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figures = require("matplotlib.figure", "a plot")
    reports = [report for report in reports if report.series]
    sizes = [len(report.series) for report in reports]
    made = figures.Figure(figsize=(9, 0.42 * sum(sizes) + 0.9 * len(reports) + 0.4))
    panels = made.subplots(len(reports), height_ratios=sizes, squeeze=False)
    for axes, report in zip(panels[:, 0], reports, strict=True):
        rows = report.rows()
        base = report.series[report.baseline].median_tokens_per_second
        rates = [row["tokens_per_second"] for row in rows]
        low, high = (
            [abs(base * row["interval"][end] - rate) for row, rate in zip(rows, rates, strict=True)]
            for end in (0, 1)
        )
        bars = axes.barh(
            [_drawn(row["name"]) for row in rows],
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
        axes.set_title(_drawn(report.title), fontsize=7, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("tokens per second, median over prompts", fontsize=8)
    made.suptitle(_drawn(reports[0].machine), fontsize=6, x=0.01, ha="left")
    made.tight_layout()
    return made


def _drawn(text: str) -> str:
    """Text that matplotlib draws as it is, without formulas."""
    return printable(text).replace("$", r"\$")


def same_text(compared: Sequence[ComparedRuns]) -> str:
    """How many texts are equal, and the verdicts on the others, such as ``"8/10, 2 near-ties"``."""
    verdicts = [each.verdict for each in compared]
    summary = f"{verdicts.count('equal')}/{len(verdicts)}"
    for verdict in ("near-tie", "bug"):
        if count := verdicts.count(verdict):
            summary += f", {count} {verdict}" + ("s" if count > 1 else "")
    return summary


def same_texts(
    series: Mapping[str, Series],
    baseline: str,
    plain: str | None,
    model: Any,
    sampled: bool,
    names: Sequence[str] = (),
) -> tuple[dict[str, str], list[str]]:
    """For each contestant, how many of its texts are equal to the expected ones, and the differences.

    Greedy texts are compared with the baseline's. Sampled texts of our contestants are compared with those of
    plain decoding: transformers samples different texts from the same distribution.

    Args:
        names: as for :func:`told_differences`.
    """
    found: dict[str, str] = {}
    differences: list[str] = []
    if not sampled:
        others = {name: each for name, each in series.items() if name != baseline}
        with tracked("comparing the texts", len(others), "contestant") as work:
            for name, each in others.items():
                compared = each.compared_to(series[baseline], model)
                found[name] = same_text(compared)
                differences += told_differences(name, compared, names)
                work.advance()
    elif plain is not None:
        for name, each in series.items():
            if each.speculation_stats and name != plain:
                equal = each.equals(series[plain])
                found[name] = f"{sum(equal)}/{len(equal)}"
                differences += [
                    f"{name}, call {call}: the sampled text differs from that of {plain}"
                    for call, is_equal in enumerate(equal, 1)
                    if not is_equal
                ]
    return found, differences


def told_differences(
    contestant: str, compared: Sequence[ComparedRuns], names: Sequence[str]
) -> list[str]:
    """A sentence for each text that differs.

    Args:
        compared: the verdicts on the rows of all prompts.
        names: of these rows; () for their numbers.
    """
    return [
        f"{contestant}, prompt {names[row] if names else row}: {verdict.summary()}"
        for row, verdict in enumerate(compared)
        if not verdict.equal
    ]


def _table(rows: Sequence[Sequence[str]], headings: Sequence[str], title: str = "") -> Table:
    """A table without the columns in which all cells are empty."""
    kept = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    return Table(
        [[row[place] for place in kept] for row in rows],
        [headings[place] for place in kept],
        title,
    )


def _number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _milliseconds(value: float | None) -> str:
    """Milliseconds in few characters: three digits, all before the point if there are more."""
    return "" if value is None else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
