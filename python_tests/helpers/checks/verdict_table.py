"""The tables that `make test-architectures` writes."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
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
    "crash": "an unexpected error",
    "not generated": "`model.generate` itself fails",
    "not built": "transformers can't build the model",
}


class ResultTable:
    """A pytest plugin that collects the rows which tests record as a property.

    Writes ``<stem>_<version of transformers>.csv``, and the summary as ``.md`` beside it.

    Args:
        folder: folder of the files.
        recorded: name of the property.
        stem: stem of the file names.
        summary: function that summarises all rows in Markdown.
    """

    def __init__(
        self, folder: Path, recorded: str, stem: str, summary: Callable[[list[dict[str, Any]]], str]
    ):
        self._folder, self._recorded, self._stem = folder, recorded, stem
        self._summary = summary
        self._rows: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            properties = report.user_properties
            self._rows.extend(value for name, value in properties if name == self._recorded)

    def pytest_sessionfinish(self) -> None:
        if not self._rows:
            return
        self._rows.sort(key=lambda row: ("+" in row["name"], row["name"]))
        path = self._folder / f"{self._stem}_{transformers.__version__}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._rows[0])
            writer.writeheader()
            writer.writerows(self._rows)
        path.with_suffix(".md").write_text(self._summary(self._rows))


def tables(folder: Path) -> list[ResultTable]:
    """All tables of the sweeps."""
    return [
        ResultTable(folder, "verdict", "architectures", verdicts),
        ResultTable(folder, "poison", "poison", poisoned),
    ]


def verdicts(rows: list[dict[str, Any]]) -> str:
    """Markdown: the number of architectures with each outcome, and the reasons."""
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


def poisoned(rows: list[dict[str, Any]]) -> str:
    """Markdown: the number of calls with poison drafts that gave the right text, by attention and dtype."""
    lines = [
        f"Architectures of transformers {transformers.__version__}, tiny and random, with drafts of tokens",
        "that the model can't compute with (NaN, infinite or huge embeddings; infinite keys, or all other",
        "activations): calls with the text and logits of plain decoding, chains as well as trees, these with",
        "`remove_invalid_values=True`. An architecture counts where transformers runs it with that attention",
        "and it is speculated on. Made by `make test-architectures`.",
        "",
        "| attention, dtype | architectures and further models | calls | right |",
        "|---|---|---|---|",
    ]
    for setting in [name for name in rows[0] if name not in ("name", "failed")]:
        counts = [row[setting].split("/") for row in rows if row[setting]]
        right, calls = (sum(int(count[i]) for count in counts) for i in (0, 1))
        lines.append(f"| {setting} | {len(counts)} | {calls} | {right} |")
    lines += [f"- {row['name']}: {row['failed']}" for row in rows if row["failed"]]
    return "\n".join(lines) + "\n"
