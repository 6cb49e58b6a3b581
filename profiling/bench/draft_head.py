"""Time a draft by an EAGLE-3 head on a GPU: the fused op against the same head as PyTorch modules.

    python profiling/bench_draft_head_cuda.py --out profiling/results/draft_head_h200     # all cases
    python profiling/bench_draft_head_cuda.py --quick                  # a few of each kind, half a minute
    python profiling/bench_draft_head_cuda.py --head 8b --draft "chain 5" --batch 1 --weights int8
    python profiling/bench_draft_head_cuda.py --dry-run                # no GPU: cases, bytes, estimates

A call does the work of a decoding step: it adds NEW committed elements per row to a cache of --context
elements and drafts a chain or a dynamic tree. The op, the modules and a CUDA graph of the modules take
turns call by call, with flushed caches. Times are measured between CUDA events and include waiting for the
host; "host us" is the host's time of a call on an idle device. GB/s counts the weights once per level, and
the cache; %read is its share of the best read bandwidth measured in this run. The modules have 16-bit
weights in every row. "agree" is the share of drafted tokens that op and modules have in common; it is not a
test, because rounding makes their drafts differ sooner or later.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from draft_calls import DraftCall, RandomHead, captured
from draft_heads import HEADS, WEIGHT_BYTES, head_config, widths
from model_draft_head import MACHINES, Workload, draft_estimate, level_estimates
from text_table import format_table
from timing import Stopwatch

from specdec_ext.evaluate.machine import machine_line
from specdec_ext.tree.config import TreeConfig

DRAFTS = {
    **{f"chain {depth}": TreeConfig(depth=depth) for depth in (3, 5, 7)},
    "tree 60": TreeConfig(depth=8, top_k=5, num_nodes=60),
}
BATCHES = (1, 4, 16)
CONFIGS = {**HEADS, "tiny": head_config(64, 96, 4, 2, 600, head_dim=16, draft_vocab=300)}
READ = 1 << 30  # bytes read to measure the read bandwidth
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    head: str
    weights: str
    draft: str
    batch: int

    @property
    def tree(self) -> TreeConfig:
        return DRAFTS[self.draft]


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The cases to run, sorted by head and weights, because memory holds one head at a time."""
    heads, weights = options.head or list(HEADS), options.weights or list(WEIGHT_BYTES)
    if options.quick:
        cases = [Case(head, kind, "chain 5", 1) for head in heads for kind in weights]
        cases += [Case(head, weights[0], "tree 60", 1) for head in heads]
        cases += [Case(heads[0], weights[0], "chain 5", batch) for batch in (4, 16)]
    else:
        cases = [
            Case(head, kind, draft, batch)
            for head in heads
            for kind in weights
            for draft in options.draft or DRAFTS
            for batch in options.batch or BATCHES
        ]
    order = list(CONFIGS), list(WEIGHT_BYTES)
    return sorted(cases, key=lambda case: (order[0].index(case.head), order[1].index(case.weights)))


def agreement(call: DraftCall) -> float:
    """Share of the drafted tokens that op and modules have in common, row by row."""
    ours, theirs = (drafted[0][:, 1:] for drafted in (call.ours(), call.theirs()))
    common = (ours[:, :, None] == theirs[:, None, :]).any(-1)
    return common.float().mean().item()


def host_us(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median host time of a call on an idle device."""
    calls = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter_ns()
        run()
        calls.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(calls)


def measure(
    case: Case, random: RandomHead, stopwatch: Stopwatch, options: argparse.Namespace
) -> dict[str, Any]:
    call = DraftCall.make(random, case.tree, options.context, case.batch, case.weights)
    agree = agreement(call)
    contestants = {"ours": call.ours, "torch": call.theirs}
    if stopwatch.device.type == "cuda":
        contestants["graph"] = captured(call.theirs)
    times = stopwatch.time(contestants, options.repeats)
    levels = len(widths(case.tree))
    row: dict[str, Any] = {
        "head": case.head,
        "weights": case.weights,
        "draft": case.draft,
        "batch": case.batch,
        "levels": levels,
        "needed_mb": call.needed_bytes / 1e6,
        "host_us": host_us(call.ours, options.repeats, stopwatch.device),
        "agree": agree,
    }
    for name, each in times.items():
        row |= {f"{name}_us": each.median, f"{name}_p10_us": each.quantile(0.1)}
    row["level_us"] = row["ours_us"] / levels
    row["gb_per_s"] = call.needed_bytes / row["ours_us"] / 1e3
    return row


def read_gb_per_s(stopwatch: Stopwatch) -> float:
    """Best read bandwidth of 20 long reads and of the stopwatch's shorter ones."""
    times = stopwatch.time({"read": stopwatch.reader(READ)}, 20, warm=True)["read"]
    return max(READ / min(times.calls) / 1e3, stopwatch.bandwidth().read)


HEADER = ["head", "weights", "draft", "batch", "MB", "us", "p10", "us/level", "GB/s", "%read"]
HEADER += ["host us", "torch us", "graph us", "vs torch", "vs graph", "agree"]
TEXT = ("head", "weights", "draft")


def cells(row: dict[str, Any]) -> list[str]:
    graph = row.get("graph_us")
    return [
        *(str(row[name]) for name in ("head", "weights", "draft", "batch")),
        *(f"{row[name]:.0f}" for name in ("needed_mb", "ours_us", "ours_p10_us", "level_us")),
        *(f"{row[name]:.0f}" for name in ("gb_per_s", "read_percent", "host_us", "torch_us")),
        f"{graph:.0f}" if graph else "-",
        f"{row['torch_us'] / row['ours_us']:.1f}x",
        f"{graph / row['ours_us']:.1f}x" if graph else "-",
        f"{row['agree']:.0%}",
    ]


def show_plan(cases: list[Case], context: int) -> None:
    """Print the cases and the model's estimates for an H200, without running them."""
    lines = []
    for case in cases:
        work = Workload(CONFIGS[case.head], case.tree, context, case.batch, case.weights)
        total = draft_estimate(level_estimates(work, MACHINES["h200"]))
        size = total["weight_bytes"] + total["cache_bytes"]
        line = [case.head, case.weights, case.draft, str(case.batch), f"{size / 1e6:.0f}"]
        lines.append(line + [f"{total[name]:.0f}" for name in ("floor_us", "best_us", "worst_us")])
    print("not run; estimates of model_draft_head.py for an H200")
    print(format_table([*HEADER[:4], "MB streamed", "floor us", "best", "worst us"], lines, TEXT))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", action="append", choices=CONFIGS, help="may be repeated")
    parser.add_argument("--weights", action="append", choices=WEIGHT_BYTES, help="likewise")
    parser.add_argument("--draft", action="append", choices=DRAFTS, help="likewise")
    parser.add_argument("--batch", action="append", type=int, help="likewise")
    parser.add_argument("--quick", action="store_true", help="a few cases of each head")
    parser.add_argument("--context", type=int, default=1024, help="elements in the cache")
    parser.add_argument("--repeats", type=int, default=50, help="calls of each, at least 5")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="print the cases and do nothing")
    parser.add_argument("--out", type=Path, help="write OUT.json")
    options = parser.parse_args(arguments)
    cuda_is_missing = options.device == "cuda" and not torch.cuda.is_available()
    if cuda_is_missing and not options.dry_run:
        parser.error("needs a GPU and a CUDA build of torch; --dry-run prints what it would do")
    return options


@torch.inference_mode()
def measure_all(
    cases: list[Case], stopwatch: Stopwatch, options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for head, of_head in groupby(cases, key=lambda case: case.head):
        random = RandomHead(CONFIGS[head], DTYPES[options.dtype], stopwatch.device)
        for case in of_head:
            print(f"{case} ...", file=sys.stderr)
            rows.append(measure(case, random, stopwatch, options))
        del random
        if stopwatch.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    cases = chosen_cases(options)
    if options.dry_run:
        return show_plan(cases, options.context)
    device = torch.device(options.device)
    stopwatch = Stopwatch(device)
    machine = machine_line(device)
    print(machine)
    before = read_gb_per_s(stopwatch)
    rows = measure_all(cases, stopwatch, options)
    # Measured before and after, because other work on the machine may slow down one of the two.
    read = max(before, read_gb_per_s(stopwatch))
    for row in rows:
        row["read_percent"] = 100 * row["gb_per_s"] / read
    print(f"read {read:.0f} GB/s, {options.dtype}, context {options.context}, caches flushed")
    print(format_table(HEADER, [cells(row) for row in rows], TEXT))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine, "read_gb_per_s": read, "dtype": options.dtype}
        report |= {"context": options.context, "rows": rows}
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
