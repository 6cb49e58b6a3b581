"""Draw the figure of the documentation from committed measurements.

    python tools/docs/figures.py

``docs/domain.svg``: a head before and after it was trained on another domain.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from specdec_ext.evaluate.benchmark import PLAIN  # noqa: E402
from specdec_ext.evaluate.speedup import Speedup, bootstrap  # noqa: E402

RESULTS = ROOT / "profiling" / "results"
BEFORE, AFTER = "#9aa0a6", "#1a73e8"
# A row of a report, as specdec bench and python profiling generate write it.
Row = Mapping[str, Any]


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
    reports = [rows_of(read(name)) for name in domains.values()]
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


def _whiskers(ratios: Sequence[Speedup]) -> list[list[float]]:
    return [[each.value - each.low for each in ratios], [each.high - each.value for each in ratios]]


def main() -> None:
    style = {"svg.fonttype": "none", "svg.hashsalt": "domain", "axes.titlesize": 10.5}
    matplotlib.rcParams.update(style)
    figure = domain()
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "domain.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
