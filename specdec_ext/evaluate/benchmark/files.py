"""Reports as files: JSON, JSON lines and CSV for programs, Markdown and HTML for people."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec_ext.display.page import page, paragraph, svg
from specdec_ext.display.text import as_markdown
from specdec_ext.evaluate.benchmark.report import Report, figure
from specdec_ext.evaluate.breakdown import Breakdown
from specdec_ext.preflight.extras import require
from specdec_ext.preflight.outputs import writable_file

TITLE = "Benchmark"


def check_file(path: Path, option: str, formats: Sequence[str] = ()) -> None:
    """Refuse a file that can't be written in the format that its suffix names.

    Args:
        path: the file.
        option: the option that names it, for messages.
        formats: the suffixes that are known; () for those of :func:`write`.

    Raises:
        ValueError: if its name ends with no known suffix.
        OSError: if it can't be written.
        ImportError: if a package for its format is not installed.
    """
    formats = formats or [*_FORMATS]
    writable_file(path, option)
    if path.suffix not in formats:
        raise ValueError(
            f"{option} {path}: the name must end with one of {', '.join(formats)}, which is the format"
        )
    if path.suffix == ".html":
        require("matplotlib", f"{option} {path}")


def write(
    reports: Sequence[Report], paths: Sequence[Path], breakdowns: Sequence[Breakdown] = ()
) -> None:
    """Write the same reports to several files, in the formats that their suffixes name.

    Files for programs are written first, so that what was measured is kept if a picture can't be drawn.

    Args:
        reports: at least one.
        paths: checked with :func:`check_file`.
        breakdowns: of the drafters of the first report.
    """
    order = list(_FORMATS)
    for path in sorted(paths, key=lambda each: order.index(each.suffix)):
        path.write_text(_FORMATS[path.suffix](reports, breakdowns), "utf-8")


def _json(reports: Sequence[Report], breakdowns: Sequence[Breakdown]) -> str:
    records = [report.record() for report in reports]
    records[0]["breakdowns"] = [asdict(each) for each in breakdowns]
    return json.dumps(records, indent=1) + "\n"


def _lines(reports: Sequence[Report], breakdowns: Sequence[Breakdown]) -> str:
    return "".join(json.dumps(each) + "\n" for each in _rows(reports))


def _rows(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """A record per contestant and report."""
    return [
        {"machine": report.machine, "settings": report.settings, **row}
        for report in reports
        for row in report.all_rows()
    ]


def _csv(reports: Sequence[Report], breakdowns: Sequence[Breakdown]) -> str:
    """A line per contestant and report; lists of one value per prompt are left to JSON."""
    rows = [_flat(row) for row in _rows(reports)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Objects inside an object as columns of it, such as ``milliseconds.itl.p99``."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        full = f"{prefix}{name}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{full}.")
        elif isinstance(value, list):
            if not name.endswith(("_by_prompt", "_by_request")):
                flat[full] = " ".join(map(str, value))
        else:
            flat[full] = value
    return flat


def _markdown(reports: Sequence[Report], breakdowns: Sequence[Breakdown]) -> str:
    def as_list(texts: Sequence[str]) -> str:
        return "\n".join(f"- {as_markdown(text)}" for text in texts)

    parts = [f"# {TITLE}", as_markdown(reports[0].machine)]
    for report in reports:
        parts += [table.markdown() for table in (*report.tables(), *report.details())]
        parts.append(as_list(report.notes()))
    parts += [table.markdown() for each in breakdowns for table in each.tables()]
    return "\n\n".join(parts) + "\n"


def _html(reports: Sequence[Report], breakdowns: Sequence[Breakdown]) -> str:
    parts = [paragraph(reports[0].machine), svg(figure(reports))]
    for report in reports:
        parts += [table.html() for table in report.tables()]
        parts += map(paragraph, report.notes())
        tables = "".join(table.html() for table in report.details())
        parts.append(f"<details><summary>Details</summary>{tables}</details>")
    parts += [table.html() for each in breakdowns for table in each.tables()]
    return page(TITLE, parts)


# Suffix -> text of the file; what is measured before what is drawn.
_FORMATS: dict[str, Callable[[Sequence[Report], Sequence[Breakdown]], str]] = {
    ".json": _json,
    ".jsonl": _lines,
    ".csv": _csv,
    ".md": _markdown,
    ".html": _html,
}
