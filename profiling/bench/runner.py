"""The runner of all benchmarks: cases are checked and timed in turn, results are shown and written.

A benchmark of single calls is a list of :class:`Case`, which :func:`measure_all` turns into rows; a benchmark
of generation makes its rows from :mod:`specdec_ext.evaluate.benchmark`. Both measure with
:func:`specdec_ext.evaluate.measuring.take_turns`, and both hand their rows to :class:`Results`, which prints
them under the machine line and writes ``OUT.json`` and ``OUT.md``. ``--add`` keeps the rows of ``OUT.json``
that a run does not measure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text_table import format_markdown, format_table

from bench.stopwatch import Stopwatch
from specdec_ext.evaluate.measuring import Call
from specdec_ext.evaluate.speedup import bootstrap

Row = dict[str, Any]
# Heading -> a format string for the row, or a function of it. A value that the row lacks is shown as "-".
Columns = Mapping[str, str | Callable[[Row], str]]

OURS = "ours"


@dataclass(frozen=True)
class Case:
    """One row of a benchmark of calls.

    Attributes:
        key: the values that name the row.
        calls: name -> call; ``OURS`` is the one that all others are compared with.
        moved_bytes: bytes that one of our calls has to move.
        agree: whether all calls compute the same; if not, nothing is timed.
        primers: see :meth:`Stopwatch.time`.
        more: further values of the row, computed after the calls were timed.
    """

    key: Row
    calls: Mapping[str, Call]
    moved_bytes: int
    agree: Callable[[], bool]
    primers: Mapping[str, Call] | None = None
    more: Callable[[], Row] = dict


def measure(
    case: Case,
    stopwatch: Stopwatch,
    repeats: int,
    warm: bool = False,
    seconds: float = float("inf"),
) -> Row:
    """Microseconds of every call, our bandwidth, and how much longer the other calls take.

    ``vs_X`` is the ratio of the medians of call X and of ours, ``vs_X_95`` its 95 % interval over turns.

    Raises:
        SystemExit: if the calls do not compute the same.
    """
    if not case.agree():
        raise SystemExit(f"{' '.join(map(str, case.key.values()))}: the results differ; not timed")
    times = stopwatch.time(case.calls, repeats, primers=case.primers, warm=warm, seconds=seconds)
    ours = times[OURS]
    row = {**case.key, "calls": len(ours), "moved_mb": case.moved_bytes / 1e6}
    for name, each in times.items():
        p10, row[f"{name}_us"], p90 = np.quantile(each, (0.1, 0.5, 0.9)).tolist()
        row |= {f"{name}_p10_us": p10, f"{name}_p90_us": p90}
        if name != OURS:
            ratio = bootstrap(each, ours)
            row |= {f"vs_{name}": ratio.value, f"vs_{name}_95": [ratio.low, ratio.high]}
    row["gb_per_s"] = case.moved_bytes / row["ours_us"] / 1e3
    return {**row, **case.more()}


def measure_all(
    cases: Iterable[Case], stopwatch: Stopwatch, repeats: int, **options: Any
) -> tuple[list[Row], dict[str, float]]:
    """Rows of all cases with their shares of the device's bandwidth, and :meth:`Stopwatch.bandwidth`.

    The bandwidth is the best of two measurements, before and after the cases, because other work on the
    machine may slow one of them.
    """
    before = stopwatch.bandwidth()
    rows = []
    for case in cases:
        print(*case.key.values(), "...", file=sys.stderr)
        rows.append(measure(case, stopwatch, repeats, **options))
    after = stopwatch.bandwidth()
    bandwidth = {name: max(before[name], after[name]) for name in before}
    for row in rows:
        row["copy_percent"] = 100 * row["gb_per_s"] / bandwidth["copy_gb_per_s"]
        row["read_percent"] = 100 * row["gb_per_s"] / bandwidth["read_gb_per_s"]
    return rows, bandwidth


@dataclass
class Results:
    """Rows of a benchmark as text, as JSON and as Markdown.

    Attributes:
        title: heading of the Markdown page.
        machine: see :func:`specdec_ext.evaluate.machine.machine_line`.
        columns: of the tables, in text and in Markdown.
        key: names of the values that tell one row from another.
        rows: one record each.
        settings: what all rows have in common, such as the device's bandwidth.
        notes: Markdown lines below the table.
        records: records of the runs behind the rows.
    """

    title: str
    machine: str
    columns: Columns
    key: Sequence[str]
    rows: list[Row]
    settings: Row = field(default_factory=dict)
    notes: Sequence[str] = ()
    records: list[Row] = field(default_factory=list)

    def publish(self, out: Path | None = None, add: bool = False) -> None:
        """Print the table, and write ``out``.json and ``out``.md.

        ``add`` keeps what is there, except rows of the same key and records of the same ``run``.
        """
        heads = [*self.columns]
        print(self.machine, *self._shared(), sep="\n")
        print(format_table(heads, self._cells(), left=self.key))
        if out is None:
            return
        file = out.with_suffix(".json")
        if add and file.exists():
            kept = json.loads(file.read_text())
            measured = {self._key(row) for row in self.rows}
            self.rows = [row for row in kept["rows"] if self._key(row) not in measured] + self.rows
            runs = {record["run"] for record in self.records if "run" in record}
            old = [each for each in kept.get("records", []) if each.get("run") not in runs]
            self.records = old + self.records
        out.parent.mkdir(parents=True, exist_ok=True)
        values = {"machine": self.machine, **self.settings, "rows": self.rows}
        values |= {"records": self.records} if self.records else {}
        file.write_text(json.dumps(values, indent=1) + "\n")
        table = format_markdown(heads, self._cells())
        page = [f"# {self.title}", "", self.machine, "", *self._shared(), table, "", *self.notes]
        out.with_suffix(".md").write_text("\n".join(page).rstrip() + "\n")

    def _shared(self) -> list[str]:
        """The settings as one line, such as ``read_gb_per_s 26.7, context 512``, and an empty line."""
        shown = (
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.settings.items()
        )
        return [", ".join(shown), ""] if self.settings else []

    def _cells(self) -> list[list[str]]:
        return [[_cell(column, row) for column in self.columns.values()] for row in self.rows]

    def _key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self.key)


def _cell(column: str | Callable[[Row], str], row: Row) -> str:
    try:
        return column.format_map(row) if isinstance(column, str) else column(row)
    except KeyError:
        return "-"


def parser(
    description: str | None,
    repeats: int | None,
    unit: str,
    writes: str = "OUT.json and OUT.md",
) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have; no ``--repeats`` if nothing is repeated."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if repeats is not None:
        made.add_argument(
            "--repeats", type=int, default=repeats, help=f"{unit} (default {repeats})"
        )
    made.add_argument("--threads", type=int, help="threads of torch and of the CPU ops")
    made.add_argument("--out", type=Path, help=f"write {writes}")
    return made


def table_parser(
    description: str | None, repeats: int | None = None, unit: str = ""
) -> argparse.ArgumentParser:
    """A parser for benchmarks whose rows are :class:`Results`."""
    made = parser(description, repeats, unit)
    made.add_argument("--add", action="store_true", help="keep rows of OUT.json not measured now")
    return made


def device_parser(description: str | None, repeats: int, unit: str) -> argparse.ArgumentParser:
    """A :func:`table_parser` for benchmarks of calls, which run on the CPU or on a GPU."""
    made = table_parser(description, repeats, unit)
    add_device(made)
    return made


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``: by default a GPU, if there is one."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=best)


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parse the options and set the number of threads."""
    options = parser.parse_args(arguments)
    if vars(options).get("device") == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU and a CUDA build of torch; use --device cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    return options
