"""Measure every goal of speed and memory on a CPU and print goal, measured value and verdict.

    python profiling goals --out profiling/results/generation/goals_cpu    # idle machine, about half an hour
    python profiling goals --only speed --dtype float32
    python profiling goals --only never-slower --model bundled --batch 4 --dtype bfloat16 \
        --out profiling/results/generation/never_slower --add

"Never slower" alternates every drafter with plain decoding, call by call; its ratios are medians over
repetitions of all prompts, with 95 % intervals over repetitions. All other ratios compare medians over
prompts of one interleaved run, with 95 % intervals over prompts. A goal is met if the ratio itself reaches
it; the interval does not matter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from baselines.random_targets import random_prompts, random_target

from bench import memory, never_slower
from bench.generate import (
    AUTO,
    BUNDLED,
    PYTHON,
    RANDOM,
    bundled_contestants,
    bundled_prompts,
    random_contestants,
    synthetic_name,
)
from bench.runner import Results, Row, parse, table_parser
from specdec_ext import assets
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import HF, HF_ASSISTED, HF_LOOKUP, PLAIN, Report
from specdec_ext.evaluate.breakdown import breakdown
from specdec_ext.evaluate.machine import machine_line

KEY = ("what", "dtype")
VERDICTS = {True: "met", False: "missed", None: "not measured"}
COLUMNS = {
    **{name: f"{{{name}}}" for name in (*KEY, "goal", "measured")},
    "verdict": lambda row: VERDICTS[row["met"]],
}
PARTS = ("speed", "never-slower", "random-text", "overhead", "synthetic", "memory", "training")
SYNTHETIC_TARGET, SYNTHETIC_LENGTH, SYNTHETIC_DEPTH, SYNTHETIC_GOAL = "135m", 3.5, 7, 2.3
MEMORY_TARGET, MEMORY_CONTEXT = "500m", 2048
NEVER_SLOWER = 0.97
NOTES = """\
`python profiling goals`. The goals are for float32, and for bfloat16 with the 135M shape; the other dtype is
reported as well. Intervals are 95 %, by bootstrap over prompts, and over repetitions where a drafter is
compared with plain decoding in pairs. *Synthetic acceptance*: random weights and prescribed acceptance; it
shows the cost of speculation, not the quality of a drafter."""
QUICK_NOTE = "**A quick run, to test the script: the numbers are not meaningful.**"
# The training record of `make head`.
TRAINING = Path("build/bundled/head/tiny-python-head.training")


@dataclass(frozen=True)
class Scale:
    """Amount of work."""

    prompts: int = 10
    tokens: int = 128
    repeats: int = 3
    repetitions: int = 11  # of all prompts, in "never slower"


QUICK = Scale(prompts=1, tokens=8, repeats=1, repetitions=1)


@dataclass
class Goals:
    """Rows of the table, and the records of the runs behind them."""

    rows: list[Row] = field(default_factory=list)
    records: list[Row] = field(default_factory=list)

    def add(self, what: str, dtype: str, goal: str, measured: str, met: bool | None) -> None:
        """Add and print a row; ``met`` is None if it was not measured."""
        row = {"what": what, "dtype": dtype, "goal": goal, "measured": measured, "met": met}
        self.rows.append(row)
        print(*row.values(), sep=" | ", flush=True)

    def at_least(self, report: Report, what: str, name: str, to: str, goal: float) -> None:
        """Add a row: contestant ``name`` should be at least ``goal`` times as fast as ``to``."""
        found = report.series[name].speedup(report.series[to])
        dtype = str(report.settings["dtype"])
        self.add(what, dtype, f">= {goal:g}x", str(found), found.value >= goal)

    def at_most(
        self, what: str, dtype: str, value: float, bound: float, unit: str, digits: int
    ) -> None:
        goal, measured = f"<= {bound:.{digits}f} {unit}", f"{value:.{digits}f} {unit}"
        self.add(what, dtype, goal, measured, value <= bound)


def race(
    dtype: str, scale: Scale, names: Sequence[str], text: str = PYTHON, batch: int = 1,
    temperature: float = 0.0,
) -> Report:  # fmt: skip
    """Run these contestants with the bundled pair; the first one is the baseline."""
    target, draft = bundled_pair(dtype)
    shared = benchmark.generation_kwargs(scale.tokens, temperature)
    # Twelve prompts make three batches of four.
    count = scale.prompts if batch == 1 else max(12, batch)
    prompts = bundled_prompts(text, count, batch, target.config.vocab_size)
    if batch > 1:
        prompts = prompts[: scale.prompts]
    makers = bundled_contestants(target, draft, shared)
    with benchmark.endless(target, draft):
        return benchmark.race(
            target,
            {name: makers[name](prompts) for name in names},
            prompts,
            shared,
            scale.repeats,
            baseline=names[0],
            settings={"dtype": dtype, "text": text},
        )


@lru_cache(maxsize=1)  # the races of a dtype share the pair, and what "auto" learns about it
def bundled_pair(dtype: str) -> tuple[Any, Any]:
    kind = getattr(torch, dtype)
    return assets.load_target(kind), assets.load_draft(kind)


def speed(dtype: str, scale: Scale, found: Goals) -> None:
    greedy = race(dtype, scale, [HF, HF_ASSISTED, HF_LOOKUP, PLAIN, AUTO])
    what = "bundled pair, Python prompts, greedy, batch 1"
    found.at_least(greedy, f"{what}: auto to HF generate", AUTO, HF, 2.5)
    found.at_least(greedy, f"{what}: auto to HF assisted", AUTO, HF_ASSISTED, 2.0)
    found.at_least(greedy, f"{what}: auto to HF prompt lookup", AUTO, HF_LOOKUP, 1.7)
    sampled = race(dtype, scale, [HF, PLAIN, AUTO], temperature=0.8)
    what = "sampled (T = 0.8), coupled noise, batch 1: auto to HF generate"
    found.at_least(sampled, what, AUTO, HF, 1.5)
    batch = race(dtype, scale, [HF, PLAIN, AUTO], batch=4)
    found.at_least(batch, "batch 4: auto to HF generate", AUTO, HF, 1.6)
    found.records += [each.record() for each in (greedy, sampled, batch)]


def compare_in_pairs(model: str, batch: int, dtype: str, scale: Scale, found: Goals) -> None:
    """Part "never-slower"."""
    prompts = scale.prompts if batch == 1 else min(scale.prompts, 3)
    ratios, seconds = never_slower.measure(
        model, dtype, batch, prompts, scale.tokens, scale.repetitions
    )
    for (name, to), ratio in ratios.items():
        ours, theirs = (each.removeprefix("specdec ") for each in (name, to))
        of_plain = to == PLAIN
        what = f"{model}, batch {batch}: {ours} to "
        what += "plain" if of_plain else "the better of n-gram and head"
        measured = str(ratio) if of_plain else f"{ratio} ({theirs})"
        met = ratio.value >= NEVER_SLOWER
        found.add(what, dtype, f">= {NEVER_SLOWER:g}x", measured, met)
    pairs = {" / ".join(pair): times for pair, times in seconds.items()}
    run = f"never slower: {model}, batch {batch}, {dtype}"
    found.records.append({"run": run, "seconds": pairs})


def random_text(dtype: str, scale: Scale, found: Goals) -> None:
    report = race(dtype, scale, [PLAIN, AUTO], RANDOM)
    found.at_least(report, "random text, auto: to plain", AUTO, PLAIN, NEVER_SLOWER)
    found.records.append(report.record())


def synthetic(dtype: str, scale: Scale, found: Goals) -> None:
    target = random_target(SYNTHETIC_TARGET, getattr(torch, dtype))
    # Long texts after short prompts, because prefill costs the same with every drafter.
    shared = benchmark.generation_kwargs(2 * scale.tokens)
    makers = random_contestants(
        SYNTHETIC_TARGET, target, shared, [SYNTHETIC_LENGTH], SYNTHETIC_DEPTH
    )
    prompts = random_prompts(target.config.vocab_size, 1, 32, min(scale.prompts, 3))
    ours = synthetic_name(SYNTHETIC_LENGTH, SYNTHETIC_DEPTH)
    report = benchmark.race(
        target,
        {each: makers[each](prompts) for each in (PLAIN, ours, f"{ours}, auto")},
        prompts,
        shared,
        scale.repeats,
        baseline=PLAIN,
        settings={"dtype": dtype, "target": SYNTHETIC_TARGET},
    )
    what = f"{SYNTHETIC_TARGET} shape, synthetic acceptance 3.5 at chain 7"
    what += f", {shared['max_new_tokens']} tokens: to plain"
    found.at_least(report, what, ours, PLAIN, SYNTHETIC_GOAL)
    length = report.series[ours].mean_acceptance_length
    # With few drafts the drawn length differs from the prescribed one; the cost of a step does not depend
    # on it.
    cost = report.series[ours].break_even(report.series[PLAIN])
    assert length is not None and cost is not None
    bound = SYNTHETIC_LENGTH / SYNTHETIC_GOAL
    found.add(
        f"{SYNTHETIC_TARGET} shape: a step of chain 7 in plain steps (break-even; 3.5 over it is the "
        "ratio at 3.5)",
        dtype,
        f"<= {bound:.2f}",
        f"{cost:.2f} ({SYNTHETIC_LENGTH / cost:.2f}x at 3.5; drawn: {length:.2f})",
        cost <= bound,
    )
    found.records.append(report.record())


def overhead(dtype: str, scale: Scale, found: Goals) -> None:
    target, _ = bundled_pair(dtype)
    prompts = bundled_prompts(PYTHON, scale.prompts, 1, target.config.vocab_size)
    with benchmark.endless(target):
        ids = [prompt["input_ids"] for prompt in prompts]
        parts = breakdown(target, ids, "auto", max_new_tokens=scale.tokens)
    what = "outside target forward and draft op, per step, batch 1, greedy, auto"
    found.at_most(what, dtype, parts.outside / 1e3, 0.5, "ms", 3)
    found.records.append({"breakdown": asdict(parts)})


def memory_of_a_call(scale: Scale, found: Goals) -> None:
    report = memory.compare(MEMORY_TARGET, "bfloat16", MEMORY_CONTEXT, 64, scale.repeats)
    what = f"memory, extra over plain, {MEMORY_TARGET} shape, {MEMORY_CONTEXT} tokens of context"
    extra, bound = (report[f"{name}_bytes"] / memory.MIB for name in ("extra", "bound"))
    found.at_most(what, "bfloat16", extra, bound, "MiB", 1)
    found.records.append({"memory": report})


def training(folder: Path, found: Goals) -> None:
    """Add a row from the training record of the bundled head; nothing is trained here."""
    what = "training the bundled head from scratch on two cores (its own record)"
    path = folder / "history.jsonl"
    if not path.exists():
        return found.add(what, "float32", "< 60 min", f"no {path}", None)
    seconds = [json.loads(line)["seconds"] for line in path.read_text().splitlines()]
    minutes = sum(seconds) / 60
    measured = f"{minutes:.1f} min, {len(seconds)} steps"
    return found.add(what, "float32", "< 60 min", measured, minutes < 60)


def measure(options: argparse.Namespace, scale: Scale) -> Goals:
    found, parts = Goals(), options.only or PARTS
    of_dtype = {
        "speed": speed,
        "random-text": random_text,
        "overhead": overhead,
        "synthetic": synthetic,
    }
    for dtype in options.dtype or ("float32", "bfloat16"):
        for part in (each for each in PARTS if each in parts):
            if part in of_dtype:
                of_dtype[part](dtype, scale, found)
            elif part == "never-slower":
                for model in options.model or (BUNDLED, SYNTHETIC_TARGET):
                    for batch in options.batch or (1, 4):
                        compare_in_pairs(model, batch, dtype, scale, found)
    if "memory" in parts:
        memory_of_a_call(scale, found)
    if "training" in parts:
        training(options.training_folder, found)
    return found


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    given = table_parser(__doc__, Scale.repeats, "calls per prompt, except in never-slower")
    many: dict[str, Any] = {"action": "append"}
    given.add_argument("--only", **many, choices=PARTS, help="a part; may be repeated")
    given.add_argument("--dtype", **many, help="may be repeated")
    given.add_argument(
        "--model", **many, choices=never_slower.MODELS, help="of never-slower; may be repeated"
    )
    given.add_argument("--batch", **many, type=int, help="of never-slower; may be repeated")
    given.add_argument(
        "--repetitions",
        type=int,
        default=Scale.repetitions,
        help=f"of all prompts in never-slower (default {Scale.repetitions})",
    )
    given.add_argument("--training-folder", type=Path, default=TRAINING)
    given.add_argument("--quick", action="store_true", help="little work, to test the script")
    return parse(given, arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    scale = Scale(repeats=options.repeats, repetitions=options.repetitions)
    scale = QUICK if options.quick else scale
    found = measure(options, scale)
    machine = machine_line(torch.device("cpu"), f"transformers {transformers.__version__}")
    results = Results(
        "Goals on a CPU", machine, COLUMNS, KEY, found.rows, asdict(scale),
        [NOTES, *(["", QUICK_NOTE] if options.quick else [])], found.records,
    )  # fmt: skip
    results.publish(options.out, options.add)
