"""Results of a rollout as files: one HTML page that needs no other file, JSON, and the lock of the pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from specdec_ext.display.page import page, paragraph, svg
from specdec_ext.display.text import counted
from specdec_ext.evaluate.benchmark.report import figure, joint_notes
from specdec_ext.rollout.gates import PASS
from specdec_ext.rollout.lock import PairLock
from specdec_ext.rollout.stages import Rollout

LOCK, JSON, HTML = ".lock", ".json", ".html"
SUFFIXES = (JSON, LOCK, HTML)  # what is measured before what is drawn

_DEFINITIONS = (
    "The gate speedup compares means over prompts and turns. The ratios of the figure and of the following "
    "tables compare medians."
)


def write(found: Rollout, paths: Sequence[Path], pair: PairLock | None) -> list[Path]:
    """Write a result in the formats that the suffixes name, and return the files that were written.

    A lock is written only for a candidate that passes.

    Args:
        found: the result.
        paths: checked with ``check_file(path, option, SUFFIXES)`` of ``evaluate.benchmark.files``.
        pair: the lock of the candidate without a reference; needed for a lock.
    """
    written = []
    for path in sorted(paths, key=lambda each: SUFFIXES.index(each.suffix)):
        if path.suffix == LOCK:
            if pair is None or found.outcome != PASS:
                continue
            found.lock(pair).save(path)
        else:
            text = _html(found) if path.suffix == HTML else json.dumps(found.record(), indent=1)
            path.write_text(f"{text}\n", "utf-8")
        written.append(path)
    return written


def _html(found: Rollout) -> str:
    parts = [paragraph(text) for text in (found.summary(), *found.sentences())]
    parts += [table.html() for table in found.tables()]
    if reports := found.reports:
        parts += [paragraph(reports[0].machine), svg(figure(reports)), paragraph(_DEFINITIONS)]
    for stage in found.stages:
        if stage.report is None:
            continue
        parts.append(f"<h2>{counted(stage.streams, 'stream')}: {stage.outcome}</h2>")
        parts += [table.html() for table in stage.report.tables()]
        tables = "".join(table.html() for table in stage.report.details())
        parts.append(f"<details><summary>Details</summary>{tables}</details>")
    if reports:
        parts += ["<h2>Notes</h2>", *map(paragraph, joint_notes(reports))]
    return page(f"Rollout: {found.outcome}", parts)
