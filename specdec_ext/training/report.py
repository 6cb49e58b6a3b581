"""``write_report``: the report of a training run, one HTML page that needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_ext.display import Table
from specdec_ext.display.page import page, paragraph, svg
from specdec_ext.training.evaluation import Evaluation
from specdec_ext.training.plot import Evaluations, evaluations, history_figure
from specdec_ext.training.trainer import Progress


def write_report(
    path: Path,
    title: str,
    history: Sequence[Progress],
    start: tuple[Evaluation | None, Evaluation | None],
    settings: Mapping[str, Any],
    machine: str,
) -> None:
    """Write curves, evaluations and settings of a run.

    Args:
        path: the page.
        title: its heading.
        history: all steps of the run.
        start: the evaluations before the first step, on the new and on the previous domain.
        settings: name and value of every setting; those that are None are left out.
        machine: processor and versions.

    Raises:
        ValueError: for an empty history.
        ImportError: if matplotlib is not installed.
    """
    figure = history_figure(history, start)
    last = history[-1]
    seconds, tokens = sum(p.seconds for p in history), sum(p.tokens for p in history)
    parts = [
        paragraph(
            f"{last.step:,} steps, {tokens:,} tokens in {seconds / 60:.0f} minutes, without evaluations. "
            f"{machine}"
        ),
        svg(figure),
    ]
    new, old = evaluations(history, start)
    if new:
        parts += ["<h2>Estimates on held-out texts</h2>", _estimates(new, old).html()]
    if last.evaluation is not None:
        parts += map(paragraph, last.evaluation.sentences())
        parts += [table.html() for table in last.evaluation.tables()]
    rows = [(name, str(value)) for name, value in settings.items() if value is not None]
    parts += ["<h2>Settings</h2>", Table(rows).html()]
    path.write_text(page(title, parts), "utf-8")


def _estimates(new: Evaluations, old: Evaluations) -> Table:
    of_old = {step: f"{each.acceptance_length:.2f}" for step, each in old}
    rows = []
    for step, each in new:
        sampled = f"{each.sampled_acceptance_length:.2f}" if each.sampled else ""
        rows.append((str(step), f"{each.acceptance_length:.2f}", sampled, of_old.get(step, "")))
    columns = ("step", "greedy", "sampled at temperature 1", "previous domain, greedy")
    return Table(rows, columns, "Mean acceptance length")
