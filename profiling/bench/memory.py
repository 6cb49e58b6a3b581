"""Measure the memory that speculation adds to a call: peak resident bytes with a head and without.

    python profiling memory                          # 500M shape, bfloat16, 2048 tokens of context
    python profiling memory --out profiling/results/generation/memory_cpu

Each call runs in its own process. The peak is that of the Linux kernel (VmHWM) after the target was loaded,
so it includes reading and packing the head, prefill and decoding. The bound is the size of the head's
weights and of its keys and values, plus 5 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from baselines.random_targets import SHAPES, random_head_of, random_prompts, random_target

from bench.runner import Results, parse, table_parser
from specdec_ext.drafters import HeadDrafter
from specdec_ext.evaluate.benchmark import machine_line
from specdec_ext.evaluate.benchmark.memory import peak_bytes, reset_peak
from specdec_ext.evaluate.measuring import take_turns
from specdec_ext.generation import generate
from specdec_ext.heads.checkpoints import load_draft, save_draft
from specdec_ext.heads.config import DraftHead
from specdec_ext.tree.config import TreeConfig

PROFILING = Path(__file__).resolve().parent.parent
SLACK = 0.05
MIB = 1 << 20
DEPTH = 7


def bound(head: DraftHead, tokens: int, depth: int) -> tuple[int, int]:
    """Bytes of the head's weights, without those that it shares with the target, and of its cache.

    The cache holds keys and values of a text of ``tokens`` and of a draft of ``depth`` tokens.
    """
    config = head.config
    size = head.tensors["layers.0.mlp.down_proj.weight"].element_size()
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    return sum(tensor.nbytes for tensor in head.tensors.values()), (tokens + depth) * per_token


def measure(
    target: str, dtype: str, context: int, max_new_tokens: int, head: str | None
) -> dict[str, Any]:
    """Measure one call in this process, with the head in the folder ``head`` or without a drafter.

    Returns the machine, and resident bytes at the start of the call (``before``) and at most (``most``).
    """
    model = random_target(target, getattr(torch, dtype))
    (prompt,) = random_prompts(model.config.vocab_size, 1, context, 1)
    reset_peak(model.device)
    before = peak_bytes(model.device)
    if before is None:
        raise SystemExit(
            "this system does not report the peak memory of a process (VmHWM in /proc/self/status)"
        )
    drafter = None
    if head is not None:
        drafter = HeadDrafter(load_draft(head, keep=False), tree=TreeConfig(depth=DEPTH))
    generate(model, drafter=drafter, max_new_tokens=max_new_tokens, do_sample=False, **prompt)
    return {"before": before, "most": peak_bytes(model.device), "machine": machine_line(model)}


def measure_apart(**arguments: Any) -> dict[str, Any]:
    """Run :func:`measure` in a new process."""
    command = [sys.executable, PROFILING, "memory", "--child", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peak: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return peak


def compare(
    target: str, dtype: str, context: int, max_new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Median peaks of plain decoding and speculation, measured in turn, and the bound on the difference."""
    head = random_head_of(target, getattr(torch, dtype))
    weights, cache = bound(head, context + max_new_tokens, DEPTH)
    arguments = dict(target=target, dtype=dtype, context=context, max_new_tokens=max_new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        save_draft(head, folder)
        del head
        calls = {
            "plain": lambda: measure_apart(**arguments, head=None),
            "ours": lambda: measure_apart(**arguments, head=folder),
        }
        peaks = take_turns(calls, repeats, lambda name, call: call())
    plain, ours = (statistics.median(peak["most"] for peak in each) for each in peaks.values())
    most = (1 + SLACK) * (weights + cache)
    return {
        "machine": peaks["plain"][0]["machine"],
        "settings": {**arguments, "depth": DEPTH, "repeats": repeats},
        "plain_peak_bytes": plain,
        "speculation_peak_bytes": ours,
        "extra_bytes": ours - plain,
        "draft_weights_bytes": weights,
        "draft_cache_bytes": cache,
        "bound_bytes": most,
        "met": ours - plain <= most,
        "runs": [*zip(*peaks.values(), strict=True)],
    }


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    given = table_parser(__doc__, 3, "processes of each kind, of which the median is used")
    given.add_argument("--target", choices=SHAPES, default="500m")
    given.add_argument("--dtype", default="bfloat16")
    given.add_argument("--context", type=int, default=2048)
    given.add_argument("--max-new-tokens", type=int, default=64)
    given.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parse(given, arguments)


SIZES = ("plain_peak", "speculation_peak", "extra", "draft_weights", "draft_cache", "bound")
COLUMNS = {
    "target": "{target}",
    "dtype": "{dtype}",
    "context": "{context}",
    **{f"{name.replace('_', ' ')} MiB": f"{{{name}:.1f}}" for name in SIZES},
    "verdict": lambda row: "met" if row["met"] else "missed",
}


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    if options.child:
        print(json.dumps(measure(**options.child)))
        return
    report = compare(
        options.target, options.dtype, options.context, options.max_new_tokens, options.repeats
    )
    sizes = {name: report[f"{name}_bytes"] / MIB for name in SIZES}
    row = {**report["settings"], **sizes, "met": report["met"]}
    results = Results(
        "Memory of a call", report["machine"], COLUMNS, ("target", "dtype", "context"), [row],
        records=[report],
    )  # fmt: skip
    results.publish(options.out, options.add)
