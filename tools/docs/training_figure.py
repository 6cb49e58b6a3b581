"""Draw what training a head brings: decoding before and after, from committed measurements.

    python tools/docs/training_figure.py

The left panel compares a head with random weights and the bundled head, which ``make head`` trains, with
decoding without a head (``profiling/results/generation/never_slower.json``). The right panel shows how often
each position of the bundled head's chains is accepted (``profiling/results/generation/cpu_float32.json``).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "profiling" / "results" / "generation"
PICTURE = ROOT / "docs" / "training.svg"
BEFORE, AFTER = "#9aa0a6", "#1a73e8"
# Contestants of never_slower.json: name there -> label.
HEADS = {"random head": "random weights", "head": "trained head"}
DTYPES = ("float32", "bfloat16")
CHAINS = (
    "specdec head, fixed"  # contestant of cpu_float32.json that drafts chains of 5 in every step
)


def speed(axes: Axes, measured: dict[str, Any]) -> None:
    """Draw tokens per second relative to decoding without a head, with 95 % intervals."""
    rows = {(row["what"], row["dtype"]): row["measured"] for row in measured["rows"]}
    for place, (name, label) in enumerate(HEADS.items()):
        found = [rows[f"bundled, batch 1: {name} to plain", dtype] for dtype in DTYPES]
        ratios, lows, highs = zip(
            *(map(float, re.findall(r"\d+\.\d+", f)) for f in found), strict=True
        )
        whiskers = [
            [ratio - low for ratio, low in zip(ratios, lows, strict=True)],
            [high - ratio for ratio, high in zip(ratios, highs, strict=True)],
        ]
        bars = axes.bar(
            [column + 0.4 * place - 0.2 for column in range(len(DTYPES))],
            ratios,
            width=0.36,
            yerr=whiskers,
            color=(BEFORE, AFTER)[place],
            error_kw={"elinewidth": 0.8},
            label=label,
        )
        axes.bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios], padding=3, fontsize=9)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(DTYPES)), DTYPES)
    axes.set(ylim=(0, 1.8), title="speed, relative to decoding without a head")
    axes.legend(frameon=False, loc="upper center", ncols=2, fontsize=9)


def acceptance(axes: Axes, report: dict[str, Any]) -> None:
    """Draw the share of the trained head's drafts that are accepted up to each position."""
    (row,) = (row for row in report["rows"] if row["name"] == CHAINS)
    shares = row["acceptance_per_position"]
    bars = axes.bar(range(1, len(shares) + 1), shares, color=AFTER)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=9)
    length = row["mean_acceptance_length"]
    axes.set(
        ylim=(0, 1),
        xlabel="position in the draft",
        title=f"drafts of the trained head accepted up to a position\n(acceptance length {length:.2f})",
    )


def main() -> None:
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "training"})
    never_slower = json.loads((RESULTS / "never_slower.json").read_text())
    (by_drafter,) = json.loads((RESULTS / "cpu_float32.json").read_text())
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    speed(left, never_slower)
    acceptance(right, by_drafter)
    for axes in (left, right):
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, -0.03, f"left: {never_slower['machine']}", fontsize=6)
    figure.text(0.01, -0.07, f"right: {by_drafter['machine']}", fontsize=6)
    figure.savefig(PICTURE, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
