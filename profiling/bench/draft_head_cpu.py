"""Time a draft by an EAGLE-3 head on the CPU: the op ``draft_head`` against the same head in PyTorch.

    python profiling/bench_draft_head.py                            # all cases, all threads
    python profiling/bench_draft_head.py --case small --threads 1 --repeats 200
    python profiling/bench_draft_head.py --out profiling/results/draft_head_cpu

A call does the work of a decoding step: it adds NEW committed elements to a cache of --context elements and
drafts a chain or a dynamic tree. Unless --warm, processor caches are flushed before each call, as the
target's weights flush them in decoding, and the same code then drafts with a small head, so that code and
threads are ready (``timing.py``). GB/s counts the head's weights once per level, and the cache; %read is its
share of this machine's read bandwidth. In float32 the script fails unless both draft the same trees.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from draft_calls import DraftCall, RandomHead
from draft_heads import cache_bytes
from text_table import format_table
from timing import Stopwatch

from specdec_ext.evaluate.machine import machine_line
from specdec_ext.heads.config import HeadConfig
from specdec_ext.tree.config import TreeConfig

CHAIN = TreeConfig(depth=5)
TREE = TreeConfig(depth=5, top_k=8, num_nodes=41)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    hidden: int
    intermediate: int
    head_dim: int
    draft_vocab: int
    dtype: torch.dtype
    tree: TreeConfig
    rows: int = 1

    @property
    def config(self) -> HeadConfig:
        return HeadConfig(
            kind="eagle3",
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.hidden // self.head_dim,
            num_kv_heads=2,
            head_dim=self.head_dim,
            num_layers=1,
            vocab_size=2 * self.draft_vocab,
            draft_vocab_size=self.draft_vocab,
            target_hidden_size=self.hidden,
            num_features=3,
        )


SIZES = {"large": (1024, 3584, 128, 16_384), "small": (256, 704, 64, 4096)}
CASES = [
    Case("large", *SIZES["large"], torch.bfloat16, CHAIN),
    Case("large", *SIZES["large"], torch.bfloat16, TREE),
    *(
        Case("small", *SIZES["small"], dtype, tree)
        for dtype in (torch.float32, torch.bfloat16)
        for tree in (CHAIN, TREE)
    ),
    Case("small", *SIZES["small"], torch.float32, CHAIN, rows=8),
]


PRIMER_SIZES = {"hidden": 64, "intermediate": 96, "head_dim": 32, "draft_vocab": 128}
PRIMER_CONTEXT = 8


@dataclass(frozen=True)
class Contest:
    """The calls to be compared in a case, and the bytes that one of them moves."""

    runs: dict[str, Callable[[], Any]]
    moved_bytes: int


def contest(case: Case, context: int) -> Contest:
    config, dtype = case.config, case.dtype
    random = RandomHead(config, dtype, "cpu")
    call = DraftCall.make(random, case.tree, context, case.rows)
    if dtype == torch.float32:
        for name, given, expected in zip(
            ("tokens", "parents"), call.ours(), call.theirs(), strict=False
        ):
            if not torch.equal(given, expected):
                raise SystemExit(f"{case.name}: the op and PyTorch draft different {name}")
    tensors = random.head.tensors
    weights = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    per_level = sum(
        size for name, size in weights.items() if name not in ("fc.weight", "draft_to_target")
    )
    cache = case.rows * cache_bytes(config, context) * dtype.itemsize // 2
    moved = weights["fc.weight"] + case.tree.depth * (per_level + cache)
    return Contest({"ours": call.ours, "torch": call.theirs}, moved)


def measure(
    case: Case, context: int, repeats: int, warm: bool, stopwatch: Stopwatch
) -> dict[str, Any]:
    work = contest(case, context)
    primers = None if warm else contest(replace(case, **PRIMER_SIZES), PRIMER_CONTEXT).runs
    times = stopwatch.time(work.runs, repeats, primers=primers, warm=warm)
    row: dict[str, Any] = {
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "draft": f"tree {case.tree.num_nodes}"
        if case.tree.top_k > 1
        else f"chain {case.tree.depth}",
        "rows": case.rows,
        "context": context,
        "moved_mb": work.moved_bytes / 1e6,
    }
    for name, each in times.items():
        row |= {f"{name}_us": each.median, f"{name}_p10_us": each.quantile(0.1)}
    row["gb_per_s"] = work.moved_bytes / row["ours_us"] / 1e3
    row["p10_gb_per_s"] = work.moved_bytes / row["ours_p10_us"] / 1e3
    return row


def table(rows: list[dict[str, Any]]) -> str:
    header = ["case", "dtype", "draft", "rows", "MB", "median", "p10 us", "GB/s", "%read"]
    header += ["p10 %read", "torch us", "vs torch", "p10"]
    return format_table(
        header,
        [
            [
                *(str(row[name]) for name in ("case", "dtype", "draft", "rows")),
                *(
                    f"{row[name]:.0f}"
                    for name in ("moved_mb", "ours_us", "ours_p10_us", "gb_per_s")
                ),
                *(f"{row[name]:.0f}" for name in ("read_percent", "p10_read_percent", "torch_us")),
                f"{row['torch_us'] / row['ours_us']:.1f}x",
                f"{row['torch_p10_us'] / row['ours_p10_us']:.1f}x",
            ]
            for row in rows
        ],
        left=("case", "dtype", "draft"),
    )


def main(
    case: Annotated[list[str] | None, typer.Option(help="large or small; may be repeated")] = None,
    context: Annotated[int, typer.Option(help="elements in the cache")] = 512,
    repeats: Annotated[int, typer.Option(help="calls of each, at least 5")] = 60,
    threads: Annotated[int | None, typer.Option(help="threads of the op and of torch")] = None,
    warm: Annotated[
        bool, typer.Option(help="do not flush the processor's caches between calls")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="write OUT.json")] = None,
) -> None:
    if threads:
        torch.set_num_threads(threads)
    chosen = [each for each in CASES if not case or each.name in case]
    if not chosen:
        raise typer.BadParameter(f"{case}: expected some of {sorted(SIZES)}", param_hint="--case")
    stopwatch = Stopwatch(torch.device("cpu"))
    machine = machine_line(torch.device("cpu"))
    bandwidth = stopwatch.bandwidth()
    rows = [measure(each, context, repeats, warm, stopwatch) for each in chosen]
    bandwidth = bandwidth.best(stopwatch.bandwidth())
    for row in rows:
        row["read_percent"] = 100 * row["gb_per_s"] / bandwidth.read
        row["p10_read_percent"] = 100 * row["p10_gb_per_s"] / bandwidth.read
    print(machine)
    print(f"read {bandwidth.read:.0f} GB/s, caches {'warm' if warm else 'flushed'}")
    print(table(rows))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine, "read_gb_per_s": bandwidth.read, "warm": warm, "rows": rows}
        out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
