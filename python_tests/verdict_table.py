"""The table that `make test-architectures` writes."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers

MEANING = {
    "exact-tree": "trees of drafts, text of `model.generate`",
    "exact-chain": "chains of drafts, text of `model.generate`",
    "exact-plain": "one token at a time, text of `model.generate`",
    "refused": "an error with the reason",
    "wrong": "another text",
    "vacuous": "nothing drafted was accepted, or the model does not read its prompt",
    "crash": "an error from elsewhere",
    "not generated": "`model.generate` itself fails",
    "not built": "transformers can't build the model",
}


class VerdictTable:
    """A pytest plugin that collects the rows that tests record as the property ``verdict``.

    Writes ``architectures_<version of transformers>.csv``, and the counts and everything that is not exact as
    ``.md`` beside it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._rows: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._rows.extend(value for name, value in report.user_properties if name == "verdict")

    def pytest_sessionfinish(self) -> None:
        if not self._rows:
            return
        self._rows.sort(key=lambda row: ("+" in row["name"], row["name"]))
        path = self._folder / f"architectures_{transformers.__version__}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._rows[0])
            writer.writeheader()
            writer.writerows(self._rows)
        path.with_suffix(".md").write_text(summary(self._rows))


def summary(rows: list[dict[str, Any]]) -> str:
    """Markdown: how many architectures fare how, and why not better."""
    lines = [
        f"Architectures of transformers {transformers.__version__}, tiny, random, in float32: greedy text",
        "and logits with every scripted drafter, one prompt and three of different lengths, against",
        "`model.generate`. Made by `make test-architectures`.",
        "",
        "| outcome | architectures | further models | |",
        "|---|---|---|---|",
    ]
    architectures = Counter(row["outcome"] for row in rows if "+" not in row["name"])
    variants = Counter(row["outcome"] for row in rows if "+" in row["name"])
    for outcome, meaning in MEANING.items():
        lines.append(f"| {outcome} | {architectures[outcome]} | {variants[outcome]} | {meaning} |")
    lines += ["", "| | outcome | batch | rollback | |", "|---|---|---|---|---|"]
    for row in rows:
        if row["outcome"] != "exact-tree":
            detail = row["detail"].replace("|", "\\|")
            lines.append(
                f"| {row['name']} | {row['outcome']} | {row['batch']} | {row['rollback']} | {detail} |"
            )
    return "\n".join(lines) + "\n"
