"""Measure time and bandwidth of every op with cold caches, and compare with PyTorch.

    python profiling ops                                    # all ops of this build, best device
    python profiling ops --device cpu --threads 1 --op verify_match --op linear
    python profiling ops --device cuda --compile --cupy --out profiling/results/kernels/ops_h200

- Caches are flushed before every call: an op meets its inputs after a forward pass has streamed the weights
  of a model through the cache. On the CPU the code, Python's included, is warmed up again on small inputs.
- GB/s counts every needed input read once and every output written once; %copy and %read are its shares of
  the best copy and read bandwidth of the same run. On the CPU, verify_match reads visited nodes only and
  passes 100 %: 200 %read is half the time of one read pass over all logits.
- "vs read" is the time in which PyTorch reads as many bytes, over the op's; "vs torch" is the time of the
  formulation in baselines/torch_ops.py over the op's, with its 95 % interval. They take turns with the op,
  so other work on the machine affects all of them.
- Other work on the machine raises p90 first. Compare p10 then, or wait.
- --cupy measures once more with warm caches, by CuPy's benchmark helper and by our timer: they should agree.

The only dependency is torch. The cases are the table at the end of op_cases.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch

from bench.op_cases import CASES, OPS
from bench.op_cases import Case as OpCase
from bench.runner import OURS, Case, Results, Row, device_parser, measure_all, parse
from bench.stopwatch import Stopwatch
from specdec_ext.evaluate.machine import machine_line

# Not compiled: the PyTorch form of verify_recursive runs on the host, and that of draft_head has hundreds of
# operations (draft_head.py measures them as a CUDA graph).
UNCOMPILED = ("verify_recursive", "draft_head")
CPU_SECONDS = 4.0  # time limit per case; the table shows the number of calls made
KEY = ("op", "case", "dtype", "batch", "nodes")
COLUMNS = {
    **{name: f"{{{name}}}" for name in (*KEY, "calls")},
    "median": "{ours_us:.1f}",
    "p10": "{ours_p10_us:.1f}",
    "p90 us": "{ours_p90_us:.1f}",
    "GB/s": "{gb_per_s:.0f}",
    "%copy": "{copy_percent:.0f}",
    "%read": "{read_percent:.0f}",
    "vs read": "{vs_read:.2f}x",
    "vs torch": "{vs_torch:.1f}x",
    "95 %": "{vs_torch_95[0]:.1f}-{vs_torch_95[1]:.1f}",
}
COMPILE_COLUMNS = {"vs compile": "{vs_compile:.1f}x"}
CUPY_COLUMNS = {"warm": "{warm_us:.1f}", "cupy us": "{cupy_us:.1f}"}


def prepared(case: OpCase, stopwatch: Stopwatch, options: argparse.Namespace) -> Case:
    """The calls of a case: the op, its formulation in PyTorch, and a read of as many bytes."""
    work = case.make(stopwatch.device)

    def ours() -> Any:
        return case.run(work.arguments)

    calls = {OURS: ours, "torch": work.baseline, "read": stopwatch.reader(work.moved_bytes)}
    if options.compile and case.function not in UNCOMPILED:
        calls["compile"] = torch.compile(work.baseline)
    primers = None
    if options.device == "cpu":
        small = case.reduced().make(stopwatch.device)
        primers = dict.fromkeys(calls, small.baseline)
        primers[OURS] = lambda: case.run(small.arguments)

    def by_cupy() -> Row:
        warm = stopwatch.time({OURS: ours}, options.repeats, warm=True)[OURS]
        return {"warm_us": statistics.median(warm), "cupy_us": cupy_median(ours, options.repeats)}

    dtype = str(case.dtype).removeprefix("torch.")
    key = dict(zip(KEY, (case.op, case.label, dtype, case.batch, case.nodes), strict=True))
    more = by_cupy if options.cupy else dict
    device = stopwatch.device
    return Case(key, calls, work.moved_bytes, lambda: case.agrees(device), primers, more)


def cupy_median(run: Any, repeats: int) -> float:
    from cupyx.profiler import benchmark

    times = benchmark(run, n_repeat=repeats, n_warmup=3).gpu_times[0]
    return 1e6 * statistics.median(times.tolist())


def chosen_cases(
    names: list[str], models: list[str], device: str, largest: bool = False
) -> tuple[list[OpCase], list[str]]:
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


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    given = device_parser(__doc__, 100, "calls per case, at least 5")
    given.add_argument("--op", action="append", default=[], help="may be repeated")
    given.add_argument("--model", action="append", default=[], help="may be repeated")
    given.add_argument("--largest", action="store_true", help="only the largest case per op")
    given.add_argument("--compile", action="store_true", help="also compare with torch.compile")
    given.add_argument("--cupy", action="store_true", help="check the timer against CuPy's")
    options = parse(given, arguments)
    if options.cupy and options.device != "cuda":
        given.error("--cupy times CUDA work; use it with --device cuda")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    chosen, missing = chosen_cases(options.op, options.model, options.device, options.largest)
    stopwatch = Stopwatch(torch.device(options.device))
    machine = machine_line(stopwatch.device)

    def cases() -> Iterator[Case]:
        for each in chosen:
            yield prepared(each, stopwatch, options)

    seconds = CPU_SECONDS if options.device == "cpu" else float("inf")
    rows, bandwidth = measure_all(cases(), stopwatch, options.repeats, seconds=seconds)
    if missing:
        print(f"not in this build: {' '.join(missing)}")
    columns = COLUMNS | (COMPILE_COLUMNS if options.compile else {})
    columns |= CUPY_COLUMNS if options.cupy else {}
    Results("Ops", machine, columns, KEY, rows, bandwidth).publish(options.out, options.add)
