"""Measure time and bandwidth of every op with cold caches, and compare with PyTorch.

    python profiling/bench_ops.py                                    # all ops of this build, best device
    python profiling/bench_ops.py --device cpu --op verify_match --op linear
    python profiling/bench_ops.py --device cuda --compile --cupy --out profiling/results/ops_h200

GB/s counts every needed input read once and every output written once; %copy and %read are its shares of the
best copy and read bandwidth measured in the same run. ``vs read`` is the time in which PyTorch reads the same
number of bytes divided by the op's time; the two are measured in turn, so other work on the machine affects
both. An op that does not read everything, such as verify_match on the CPU, can exceed 100 %. ``--cupy``
measures once more, with warm caches, with CuPy's benchmark helper and with our timer, to check the timer.
The only dependency is torch.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from bench_cases import CASES, OPS, Case, Work
from text_table import format_table
from timing import Bandwidth, Stopwatch

from specdec_ext.evaluate.machine import machine_line

TEXT = ("op", "case", "dtype")
# Not compiled: the PyTorch form of verify_recursive runs on the host, and that of draft_head has hundreds of
# operations (bench_draft_head_cuda.py measures them as a CUDA graph).
UNCOMPILED = ("verify_recursive", "draft_head")
CPU_SECONDS = 4.0  # time limit per case; the table shows the number of calls made


def measure(
    case: Case, work: Work, stopwatch: Stopwatch, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure a case and return its row of the table."""

    def ours() -> Any:
        return case.run(work.arguments)

    contestants = {
        "ours": ours,
        "torch": work.baseline,
        "read": stopwatch.reader(work.moved_bytes),
    }
    compiled = options.compile and case.function not in UNCOMPILED
    if compiled:
        contestants["compile"] = torch.compile(work.baseline)
    primers = None
    if options.device == "cpu":
        small = case.reduced().make(stopwatch.device)
        primers = dict.fromkeys(contestants, small.baseline)
        primers["ours"] = lambda: case.run(small.arguments)
    times = stopwatch.time(contestants, options.repeats, primers=primers, seconds=options.seconds)
    median = times["ours"].median
    row: dict[str, Any] = {
        "op": case.op,
        "case": case.label,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch": case.batch,
        "nodes": case.nodes,
        "calls": len(times["ours"].calls),
        "median_us": median,
        "p10_us": times["ours"].quantile(0.1),
        "p90_us": times["ours"].quantile(0.9),
        "gb_per_s": work.moved_bytes / median / 1e3,
        "torch_us": times["torch"].median,
        "read_us": times["read"].median,
    }
    if compiled:
        row["compile_us"] = times["compile"].median
    if options.cupy:
        warm = stopwatch.time({"ours": ours}, options.repeats, warm=True)["ours"]
        row |= {"warm_us": warm.median, "cupy_us": cupy_median(ours, options.repeats)}
    return row


def add_shares(rows: list[dict[str, Any]], bandwidth: Bandwidth) -> None:
    for row in rows:
        row["copy_percent"] = 100 * row["gb_per_s"] / bandwidth.copy
        row["read_percent"] = 100 * row["gb_per_s"] / bandwidth.read


def cupy_median(run: Any, repeats: int) -> float:
    from cupyx.profiler import benchmark

    times = benchmark(run, n_repeat=repeats, n_warmup=3).gpu_times[0]
    return 1e6 * float(sorted(times.tolist())[len(times) // 2])


def table(rows: Iterable[dict[str, Any]], options: argparse.Namespace) -> str:
    header = ["op", "case", "dtype", "batch", "nodes", "calls", "median", "p10", "p90 us"]
    header += ["GB/s", "%copy", "%read", "vs read", "vs torch"]
    header += ["vs compile"] if options.compile else []
    header += ["warm", "cupy us"] if options.cupy else []
    lines = []
    for row in rows:
        line = [str(row[name]) for name in ("op", "case", "dtype", "batch", "nodes", "calls")]
        line += [f"{row[name]:.1f}" for name in ("median_us", "p10_us", "p90_us")]
        line += [f"{row[name]:.0f}" for name in ("gb_per_s", "copy_percent", "read_percent")]
        line += [f"{row['read_us'] / row['median_us']:.2f}x"]
        line += [f"{row['torch_us'] / row['median_us']:.1f}x"]
        if options.compile:
            known = "compile_us" in row
            line += [f"{row['compile_us'] / row['median_us']:.1f}x" if known else "-"]
        line += [f"{row[name]:.1f}" for name in ("warm_us", "cupy_us")] if options.cupy else []
        lines.append(line)
    return format_table(header, lines, left=TEXT)


def chosen_cases(
    names: list[str], models: list[str], device: str, largest: bool = False
) -> tuple[list[Case], list[str]]:
    """The cases to run, and the ops that are left out because this build does not have them.

    Args:
        largest: only the last case of each op, which is the largest.

    Raises:
        SystemExit: for an unknown op or model, and for a requested op that is not built.
    """
    for kind, given, known in (
        ("op", names, OPS),
        ("model", models, sorted({case.name for case in CASES})),
    ):
        if unknown := set(given) - set(known):
            sys.exit(f"--{kind} {' '.join(sorted(unknown))}: expected some of {' '.join(known)}")
    cases = [
        case
        for case in CASES
        if device in case.devices
        and (not names or case.function in names)
        and (not models or case.name in models)
    ]
    if largest:
        cases = list({case.op: case for case in cases}.values())
    missing = list(dict.fromkeys(case.function for case in cases if not case.is_built))
    if names and missing:
        sys.exit(f"--op {' '.join(missing)}: not in this build of specdec_ext; rebuild it")
    return [case for case in cases if case.is_built], missing


def write(out: Path, rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(
            file, fieldnames=dict.fromkeys(name for row in rows for name in row)
        )
        writer.writeheader()
        writer.writerows(rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=best)
    parser.add_argument("--op", action="append", default=[], help="may be repeated")
    parser.add_argument("--model", action="append", default=[], help="may be repeated")
    parser.add_argument("--largest", action="store_true", help="only the largest case per op")
    parser.add_argument("--repeats", type=int, default=100, help="calls per case, at least 5")
    parser.add_argument("--threads", type=int, help="threads of the CPU ops and of torch")
    parser.add_argument("--compile", action="store_true", help="also compare with torch.compile")
    parser.add_argument("--cupy", action="store_true", help="check the timer against CuPy's")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.csv")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU and a CUDA build of torch; use --device cpu")
    if options.cupy and options.device != "cuda":
        parser.error("--cupy times CUDA work; use it with --device cuda")
    options.seconds = CPU_SECONDS if options.device == "cpu" else float("inf")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    cases, missing = chosen_cases(options.op, options.model, options.device, options.largest)
    device = torch.device(options.device)
    stopwatch = Stopwatch(device)
    machine = machine_line(device)
    print(machine)
    before = stopwatch.bandwidth()
    rows = []
    for case in cases:
        print(f"{case.op} {case.label} ...", file=sys.stderr)
        rows.append(measure(case, case.make(device), stopwatch, options))
    # Measured before and after, because other work on the machine may slow down one of the two.
    bandwidth = before.best(stopwatch.bandwidth())
    add_shares(rows, bandwidth)
    print(f"copy {bandwidth.copy:.0f} GB/s, read {bandwidth.read:.0f} GB/s")
    if missing:
        print(f"not in this build: {' '.join(missing)}")
    print(table(rows, options))
    if options.out and rows:
        speeds = {"copy_gb_per_s": bandwidth.copy, "read_gb_per_s": bandwidth.read}
        write(options.out, rows, {"machine": machine, **speeds, "not_built": missing})


if __name__ == "__main__":
    main()
