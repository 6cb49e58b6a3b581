"""Draw the figures of the documentation from committed measurements.

    python tools/docs/figures.py

- ``docs/domain.svg``: a head before and after it was trained on another domain.
- ``docs/settings.svg``: speed over batch size, temperature, length of the context, and shape of the draft.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from specdec_ext.evaluate.benchmark import PLAIN  # noqa: E402
from specdec_ext.evaluate.speedup import Speedup, bootstrap  # noqa: E402

RESULTS = ROOT / "profiling" / "results" / "generation"
BEFORE, AFTER = "#9aa0a6", "#1a73e8"
GREEN = "#188038"
# A row of a report, as specdec bench and python profiling generate write it.
Row = Mapping[str, Any]
SYNTHETIC = "specdec, synthetic acceptance 3.5 at chain 7"
SHAPED = "specdec head, "


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def rows_of(report: Mapping[str, Any]) -> dict[str, Row]:
    return {row["name"]: row for row in report["rows"]}


def to_plain(rows: Mapping[str, Row], name: str) -> Speedup:
    """Tokens per second relative to plain decoding, with the 95 % interval over prompts."""
    ours, plain = (rows[each]["tokens_per_second_by_prompt"] for each in (name, PLAIN))
    return bootstrap(ours, plain)


def domain() -> Figure:
    """The head of the package (before) and the head that continued its training (after)."""
    domains = {"language reference,\nthe new domain": "domain_reference"}
    domains["Python code,\nthe previous domain"] = "domain_python"
    heads = {
        "before": "specdec specdec_ext/assets/tiny-python-head",
        "after": "specdec build/domain/head",
    }
    reports = [rows_of(read(name)[0]) for name in domains.values()]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    lengths, speeds = figure.subplots(1, 2)
    for offset, (label, name), colour in zip(
        (-0.2, 0.2), heads.items(), (BEFORE, AFTER), strict=True
    ):
        places = [place + offset for place in range(len(domains))]
        style = {"width": 0.36, "color": colour, "label": label}
        values = [rows[name]["fixed_acceptance_length"] for rows in reports]
        bars = lengths.bar(places, values, **style)
        lengths.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
        ratios = [to_plain(rows, name) for rows in reports]
        bars = speeds.bar(
            places,
            [each.value for each in ratios],
            yerr=_whiskers(ratios),
            error_kw={"elinewidth": 0.8},
            **style,
        )
        speeds.bar_label(bars, [f"{each.value:.2f}x" for each in ratios], padding=3)
    speeds.axhline(1, color="black", linewidth=0.8)
    lengths.set_title("acceptance length, chains of 5 in every step")
    speeds.set_title("speed, relative to plain decoding")
    for axes in (lengths, speeds):
        axes.set_xticks(range(len(domains)), list(domains))
    lengths.set_ylim(0, 5)
    speeds.set_ylim(0, 1.8)
    lengths.legend(frameon=False, ncols=2, loc="upper center")
    return figure


def settings() -> Figure:
    """Speed relative to plain decoding over four settings, one per panel."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    batch, temperature, context, shape = figure.subplots(2, 2).flat
    drafters = {
        '"auto": n-gram and head': ("specdec auto", AFTER),
        "n-gram": ("specdec n-gram", GREEN),
        "head": ("specdec head", BEFORE),
    }
    for axes, name, setting in (
        (batch, "over_batch", "batch"),
        (temperature, "over_temperature", "temperature"),
    ):
        reports = read(name)
        places = [float(report["settings"].get(setting, 0)) for report in reports]
        for label, (drafter, colour) in drafters.items():
            ratios = [to_plain(rows_of(report), drafter) for report in reports]
            values = [each.value for each in ratios]
            axes.errorbar(
                places, values, _whiskers(ratios), color=colour, label=label, marker="o", capsize=2
            )
    batch.set_xscale("log", base=2)
    batch.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    batch.set_title("rows of the batch, greedy")
    batch.legend(frameon=False)
    temperature.set_title("temperature, one row")
    reports = read("over_context")
    places = [float(report["settings"]["context"]) for report in reports]
    for label, suffix, colour in (
        ('"auto"', ", auto", AFTER),
        ("chain of 7 in every step", "", BEFORE),
    ):
        rows = [rows_of(report)[f"{SYNTHETIC}{suffix}"] for report in reports]
        context.plot(
            places, [decoding_speed(row) for row in rows], color=colour, label=label, marker="o"
        )
    context.set_xscale("log", base=2)
    context.set_xticks(places, [f"{place:.0f}" for place in places])
    context.set_title("tokens of the context, 135M model,\nprescribed acceptance length 3.5")
    context.legend(frameon=False)
    _shapes(shape)
    for axes in (batch, temperature, context, shape):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.set_ylabel("speed, relative to plain decoding")
    return figure


def _shapes(axes: Axes) -> None:
    """Speed of the head's chains and trees in every step, greedy and sampled; labels: acceptance length."""
    greedy, sampled = map(rows_of, read("over_shape"))
    names = [name for name in greedy if name.startswith(SHAPED)]
    for offset, rows, label, colour in (
        (-0.2, greedy, "greedy", AFTER),
        (0.2, sampled, "temperature 0.8", BEFORE),
    ):
        ratios = [to_plain(rows, name) for name in names]
        places = [place + offset for place in range(len(names))]
        axes.bar(
            places,
            [each.value for each in ratios],
            width=0.38,
            color=colour,
            label=label,
            yerr=_whiskers(ratios),
            error_kw={"elinewidth": 0.8},
        )
        for place, name in zip(places, names, strict=True):
            length = f"{rows[name]['mean_acceptance_length']:.2f}"
            axes.text(place, 0.05, length, ha="center", rotation=90, fontsize=8, color="white")
    axes.set_xticks(
        range(len(names)),
        [name.removeprefix(SHAPED).replace(" ", "\n") for name in names],
        fontsize=8,
    )
    axes.set_title("shape of the head's drafts, in every step\n(in the bars: acceptance length)")
    axes.legend(frameon=False, ncols=2, loc="upper right")


def decoding_speed(row: Row) -> float:
    """Speed relative to plain decoding without the time in which the prompt is read."""
    return float(row["emitted_per_step"] / row["break_even"])


def _whiskers(ratios: Sequence[Speedup]) -> list[list[float]]:
    return [[each.value - each.low for each in ratios], [each.high - each.value for each in ratios]]


def main() -> None:
    matplotlib.rcParams.update({"svg.fonttype": "none", "axes.titlesize": 10.5})
    for name, draw in {"domain": domain, "settings": settings}.items():
        matplotlib.rcParams["svg.hashsalt"] = name
        figure = draw()
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(ROOT / "docs" / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
