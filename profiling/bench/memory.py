"""Measure the memory that speculation adds to a call: peak resident bytes with a head and without.

    python profiling/bench_memory.py                       # 500M shape, bfloat16, 2048 tokens of context
    python profiling/bench_memory.py --out profiling/results/memory_cpu

Each call runs in its own process. The peak is that of the Linux kernel (VmHWM) after the target was loaded,
so it includes reading and packing the head, prefill and decoding. The bound is the size of the head's
weights and of its keys and values, plus 5 %.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from random_targets import SHAPES, random_head_of, random_prompts, random_target
from text_table import format_table

from specdec_ext.drafters import HeadDrafter
from specdec_ext.evaluate.benchmark import machine_line
from specdec_ext.evaluate.benchmark.memory import peak_bytes, reset_peak
from specdec_ext.generation import generate
from specdec_ext.heads.checkpoints import load_draft, save_draft
from specdec_ext.heads.config import DraftHead
from specdec_ext.tree.config import TreeConfig

SLACK = 0.05
MIB = 1 << 20
DEPTH = 7


@dataclass(frozen=True)
class Peak:
    """Resident bytes of one process: at the start of the call, and the peak until its end."""

    before: int
    most: int
    machine: str


@dataclass(frozen=True)
class Bound:
    """Bytes that speculation may add.

    Attributes:
        weights: weights of the head, without those that it shares with the target.
        cache: keys and values of the head for the whole text and a draft.
    """

    weights: int
    cache: int

    @classmethod
    def of(cls, head: DraftHead, tokens: int, depth: int) -> Bound:
        config = head.config
        size = head.tensors["layers.0.mlp.down_proj.weight"].element_size()
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
        weights = sum(tensor.nbytes for tensor in head.tensors.values())
        return cls(weights, (tokens + depth) * per_token)

    @property
    def total(self) -> float:
        return (1 + SLACK) * (self.weights + self.cache)


def measure(target: str, dtype: str, context: int, max_new_tokens: int, head: Path | None) -> Peak:
    """Measure one call in this process, with the head in the folder ``head`` or without a drafter."""
    kind = getattr(torch, dtype)
    model = random_target(target, kind)
    (prompt,) = random_prompts(model.config.vocab_size, 1, context, 1)
    reset_peak(model.device)
    before = peak_bytes(model.device)
    drafter = None
    if head is not None:
        drafter = HeadDrafter(load_draft(head, keep=False), tree=TreeConfig(depth=DEPTH))
    generate(model, drafter=drafter, max_new_tokens=max_new_tokens, do_sample=False, **prompt)
    most = peak_bytes(model.device)
    if before is None or most is None:
        raise typer.BadParameter(
            "this system does not report the peak memory of a process (VmHWM in /proc/self/status)"
        )
    return Peak(before, most, machine_line(model))


def measure_apart(**arguments: object) -> Peak:
    """Run :func:`measure` in a new process."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments, default=str)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def main(
    target: Annotated[str, typer.Option(help=f"one of {list(SHAPES)}")] = "500m",
    dtype: str = "bfloat16",
    context: int = 2048,
    max_new_tokens: int = 64,
    repeats: Annotated[
        int, typer.Option(help="processes of each kind, of which the median is used")
    ] = 3,
    out: Annotated[Path | None, typer.Option(help="write OUT.json")] = None,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    if child is not None:
        arguments = json.loads(child)
        folder = arguments.pop("head")
        peak = measure(**arguments, head=None if folder is None else Path(folder))
        print(json.dumps(asdict(peak)))
        return
    report = compare(target, dtype, context, max_new_tokens, repeats)
    show(report)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


def compare(
    target: str, dtype: str, context: int, max_new_tokens: int, repeats: int
) -> dict[str, object]:
    """Median peaks of plain decoding and speculation, measured in turn, and the bound on the difference."""
    head = random_head_of(target, getattr(torch, dtype))
    bound = Bound.of(head, context + max_new_tokens, DEPTH)
    arguments = dict(target=target, dtype=dtype, context=context, max_new_tokens=max_new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        save_draft(head, folder)
        del head
        runs = [
            (measure_apart(**arguments, head=None), measure_apart(**arguments, head=folder))
            for _ in range(repeats)
        ]
    plain, ours = (
        statistics.median(peak.most for peak in each) for each in zip(*runs, strict=True)
    )
    return {
        "machine": runs[0][0].machine,
        "settings": {**arguments, "depth": DEPTH, "repeats": repeats},
        "plain_peak_bytes": plain,
        "speculation_peak_bytes": ours,
        "extra_bytes": ours - plain,
        "draft_weights_bytes": bound.weights,
        "draft_cache_bytes": bound.cache,
        "bound_bytes": bound.total,
        "met": ours - plain <= bound.total,
        "runs": [[asdict(peak) for peak in pair] for pair in runs],
    }


def show(report: dict[str, object]) -> None:
    print(report["machine"])
    print(", ".join(f"{name} {value}" for name, value in report["settings"].items()))
    rows = [
        [name.removesuffix("_bytes").replace("_", " "), f"{value / MIB:.1f}"]
        for name, value in report.items()
        if name.endswith("_bytes")
    ]
    print(format_table(["", "MiB"], rows, left=[""]))
    print("met" if report["met"] else "missed")


if __name__ == "__main__":
    typer.run(main)
