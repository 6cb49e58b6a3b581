"""Measure every goal of speed and memory on a CPU and print goal, measured value and verdict.

    python profiling/bench_goals.py --out profiling/results/goals_cpu      # idle machine, about 15 minutes
    python profiling/bench_goals.py --only speed --dtype float32
    python profiling/bench_goals.py --only never-slower --model bundled --batch 4 --dtype bfloat16 \
        --out profiling/results/never_slower --add

"Never slower" alternates every drafter with plain decoding, call by call; its ratios are medians over
repetitions of all prompts, with 95 % intervals over repetitions. All other ratios compare medians over
prompts of one interleaved run, with 95 % intervals over prompts. A goal is met if the ratio itself reaches
it; the interval does not matter.

The table is printed; ``--out`` also writes it to ``<out>.md`` and all results to ``<out>.json``. ``--add``
keeps the rows of ``<out>.json`` that this run does not measure, so that a table can be made in parts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import bench_memory
import torch
import transformers
import typer
from bench_generate import (
    ADVERSARY,
    AUTO,
    HEAD,
    Text,
    bundled_contestants,
    bundled_prompts,
    head_of,
    random_contestants,
    synthetic_name,
)
from random_targets import random_draft_of, random_head_of, random_prompts, random_target
from rich.console import Console
from text_table import format_markdown, format_table

from specdec_ext import HeadDrafter, assets
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import (
    HF,
    HF_ASSISTED,
    HF_LOOKUP,
    PLAIN,
    Contestant,
    Prompt,
    Report,
)
from specdec_ext.evaluate.benchmark.speedup import Speedup, bootstrap
from specdec_ext.evaluate.breakdown import breakdown
from specdec_ext.evaluate.machine import machine_line

HEADER = ("what", "dtype", "goal", "measured", "verdict")
SYNTHETIC_LENGTH, SYNTHETIC_DEPTH = 3.5, 7
NEVER_SLOWER = 0.97
NGRAM, RANDOM_HEAD = "specdec n-gram", "specdec random head"
# The training record of `make head`.
TRAINING = Path("build/bundled/head/tiny-python-head.training")


class Part(str, Enum):
    """Parts of the table."""

    speed = "speed"
    never_slower = "never-slower"
    random_text = "random-text"
    synthetic = "synthetic"
    overhead = "overhead"
    memory = "memory"
    training = "training"


class Model(str, Enum):
    """Target models of "never slower"."""

    bundled = "bundled"
    small = "135m"


@dataclass(frozen=True)
class Scale:
    """Amount of work."""

    prompts: int = 10
    tokens: int = 128
    repeats: int = 3
    repetitions: int = 11  # of all prompts, in "never slower"

    @classmethod
    def quick(cls) -> Scale:
        return cls(prompts=1, tokens=8, repeats=1, repetitions=1)


@dataclass(frozen=True)
class Row:
    """A row of the table; ``met`` is None if it was not measured."""

    what: str
    dtype: str
    goal: str
    measured: str
    met: bool | None

    @property
    def cells(self) -> tuple[str, ...]:
        verdict = {True: "met", False: "missed", None: "not measured"}[self.met]
        return self.what, self.dtype, self.goal, self.measured, verdict


@dataclass
class Measured:
    """Rows of the table, and the records of the runs behind them."""

    rows: list[Row] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def at_least(self, report: Report, what: str, name: str, to: str, goal: float) -> None:
        """Add a row: contestant ``name`` should be at least ``goal`` times as fast as ``to``."""
        found = report.series[name].speedup(report.series[to])
        dtype = str(report.settings["dtype"])
        self.rows.append(Row(what, dtype, f">= {goal:g}x", str(found), found.value >= goal))

    def at_most(
        self, what: str, dtype: str, value: float, bound: float, unit: str, digits: int
    ) -> None:
        measured = f"{value:.{digits}f} {unit}"
        self.rows.append(
            Row(what, dtype, f"<= {bound:.{digits}f} {unit}", measured, value <= bound)
        )


class Pair:
    """The bundled models in one dtype."""

    def __init__(self, dtype: str, scale: Scale):
        kind = getattr(torch, dtype)
        self.dtype, self.scale = dtype, scale
        self.target, self.draft = assets.load_target(kind), assets.load_draft(kind)

    def race(
        self, names: list[str], text: Text = Text.python, batch: int = 1, temperature: float = 0.0
    ) -> Report:
        """Run these contestants on the bundled prompts or on random ones; the first is the baseline."""
        shared = benchmark.generation_kwargs(self.scale.tokens, temperature)
        vocab_size = self.target.config.vocab_size
        # Twelve prompts make three batches of four.
        count = self.scale.prompts if batch == 1 else max(12, batch)
        prompts = bundled_prompts(text, count, batch, vocab_size)
        if batch > 1:
            prompts = prompts[: self.scale.prompts]
        makers = bundled_contestants(self.target, self.draft, shared)
        with benchmark.endless(self.target, self.draft):
            return benchmark.race(
                self.target,
                {name: makers[name](prompts) for name in names},
                prompts,
                shared,
                self.scale.repeats,
                baseline=names[0],
                settings={"dtype": self.dtype, "text": text.value},
            )


def speed(pair: Pair, found: Measured) -> None:
    greedy = pair.race([HF, HF_ASSISTED, HF_LOOKUP, PLAIN, AUTO])
    what = "bundled pair, Python prompts, greedy, batch 1"
    found.at_least(greedy, f"{what}: auto to HF generate", AUTO, HF, 2.5)
    found.at_least(greedy, f"{what}: auto to HF assisted", AUTO, HF_ASSISTED, 2.0)
    found.at_least(greedy, f"{what}: auto to HF prompt lookup", AUTO, HF_LOOKUP, 1.7)
    sampled = pair.race([HF, PLAIN, AUTO], temperature=0.8)
    what = "sampled (T = 0.8), coupled noise, batch 1: auto to HF generate"
    found.at_least(sampled, what, AUTO, HF, 1.5)
    batch = pair.race([HF, PLAIN, AUTO], batch=4)
    found.at_least(batch, "batch 4: auto to HF generate", AUTO, HF, 1.6)
    found.records += [each.record() for each in (greedy, sampled, batch)]


@dataclass
class Race:
    """Seconds of pairs of contestants, measured call by call.

    Attributes:
        pairs: (contestant, baseline) -> seconds of both for the same prompt, in order of measurement.
    """

    pairs: dict[tuple[str, str], list[tuple[float, float]]]

    @classmethod
    def run(
        cls,
        contestants: dict[str, Contestant],
        pairs: list[tuple[str, str]],
        prompts: list[Prompt],
        repetitions: int,
    ) -> Race:
        """Run the pairs one after the other; the two contestants of a pair take turns on every prompt.

        A machine that slows down then slows both. Which of the two runs first alternates over repetitions.
        One warm-up call of each precedes a pair, so that both are as warm as for a user who generates several
        texts with the same drafter.
        """
        race = cls({})
        for pair in pairs:
            for name in pair:
                contestants[name](prompts[0])
            times = race.pairs[pair] = []
            for turn in range(repetitions):
                for prompt in prompts:
                    taken = {}
                    for name in pair if turn % 2 else pair[::-1]:
                        began = time.perf_counter()
                        contestants[name](prompt)
                        taken[name] = time.perf_counter() - began
                    times.append((taken[pair[0]], taken[pair[1]]))
        return race

    def speedup(self, name: str, to: str, prompts: int) -> Speedup:
        """Median over repetitions of the ratio of the times for all prompts."""
        times = self.pairs[name, to]
        turns = [times[i : i + prompts] for i in range(0, len(times), prompts)]
        ratios = [
            sum(theirs for _, theirs in turn) / sum(ours for ours, _ in turn) for turn in turns
        ]
        return bootstrap(ratios, [1.0] * len(ratios))


def drafters_of(
    model: Model, dtype: str, batch: int, scale: Scale
) -> tuple[list[Any], dict[str, Callable[[list[Prompt]], Contestant]], list[Prompt]]:
    """The models to run without end of sequence, the makers of all contestants, and the prompts."""
    kind, shared = getattr(torch, dtype), benchmark.generation_kwargs(scale.tokens)
    if model is Model.bundled:
        target, draft = assets.load_target(kind), assets.load_draft(kind)
        head = head_of(target)
        makers = bundled_contestants(target, draft, shared)
        count = min(scale.prompts, 3)
        vocab_size = target.config.vocab_size
        prompts = bundled_prompts(Text.python, count * batch, batch, vocab_size)[:count]
    else:
        target, draft = random_target(model.value, kind), random_draft_of(model.value, kind)
        head = random_head_of(model.value, kind)
        makers = random_contestants(model.value, target, shared, [], SYNTHETIC_DEPTH)
        for name, drafter in (("lookahead",) * 2, ("suffix",) * 2, ("n-gram", "ngram")):
            makers[f"specdec {name}"] = lambda _, drafter=drafter: benchmark.ours(
                target, drafter, shared
            )
        makers["specdec draft model"] = lambda _: benchmark.ours(target, draft, shared)
        prompts = random_prompts(target.config.vocab_size, batch, 64, 1)
    makers[RANDOM_HEAD] = lambda _: benchmark.ours(target, HeadDrafter(head), shared)
    return [target, draft], makers, prompts


def never_slower(model: Model, dtype: str, batch: int, scale: Scale, found: Measured) -> None:
    """Compare every drafter with plain decoding, and ``auto`` of the bundled pair with its better part."""
    drafters = ["specdec lookahead", "specdec suffix", "specdec draft model", RANDOM_HEAD, NGRAM]
    drafters += [ADVERSARY, *([HEAD, AUTO] if model is Model.bundled else [])]
    models, makers, prompts = drafters_of(model, dtype, batch, scale)
    parts = (NGRAM, HEAD) if model is Model.bundled else ()
    pairs = [(name, PLAIN) for name in drafters] + [(AUTO, part) for part in parts]
    with benchmark.endless(*models):
        contestants = {name: makers[name](prompts) for name in (PLAIN, *drafters)}
        race = Race.run(contestants, pairs, prompts, scale.repetitions)
    ratios = {pair: race.speedup(*pair, len(prompts)) for pair in pairs}
    best = max(parts, key=lambda part: ratios[part, PLAIN].value, default="")
    for (name, to), ratio in ratios.items():
        if to not in (PLAIN, best):
            continue
        ours, theirs = (each.removeprefix("specdec ") for each in (name, to))
        what = f"{model.value}, batch {batch}: {ours} to "
        what += "plain" if to == PLAIN else "the better of n-gram and head"
        measured = str(ratio) if to == PLAIN else f"{ratio} ({theirs})"
        met = ratio.value >= NEVER_SLOWER
        found.rows.append(Row(what, dtype, f">= {NEVER_SLOWER:g}x", measured, met))
    found.records.append(
        {
            "never slower": model.value,
            "batch": batch,
            "dtype": dtype,
            "seconds": {" / ".join(pair): times for pair, times in race.pairs.items()},
        }
    )


def random_text(pair: Pair, found: Measured) -> None:
    random = pair.race([PLAIN, AUTO], Text.random)
    found.at_least(random, "random text, auto: to plain", AUTO, PLAIN, NEVER_SLOWER)
    found.records.append(random.record())


def synthetic(dtype: str, scale: Scale, found: Measured, name: str = "135m") -> None:
    target = random_target(name, getattr(torch, dtype))
    # Long texts after short prompts, because prefill costs the same with every drafter.
    shared = benchmark.generation_kwargs(2 * scale.tokens)
    makers = random_contestants(name, target, shared, [SYNTHETIC_LENGTH], SYNTHETIC_DEPTH)
    prompts = random_prompts(target.config.vocab_size, 1, 32, min(scale.prompts, 3))
    ours = synthetic_name(SYNTHETIC_LENGTH, SYNTHETIC_DEPTH)
    report = benchmark.race(
        target,
        {each: makers[each](prompts) for each in (PLAIN, ours, f"{ours}, auto")},
        prompts,
        shared,
        scale.repeats,
        baseline=PLAIN,
        settings={"dtype": dtype, "target": name},
    )
    what = f"{name} shape, synthetic acceptance 3.5 at chain 7, {shared['max_new_tokens']} tokens: to plain"
    found.at_least(report, what, ours, PLAIN, 2.3)
    length, prescribed = report.series[ours].mean_acceptance_length, SYNTHETIC_LENGTH
    assert length is not None
    # With few drafts the drawn length differs from the prescribed one; the cost of a step does not depend
    # on it.
    cost = report.series[ours].break_even(report.series[PLAIN])
    assert cost is not None
    found.rows.append(
        Row(
            f"{name} shape: a step of chain 7 in plain steps (break-even; 3.5 over it is the ratio at 3.5)",
            dtype,
            f"<= {prescribed / 2.3:.2f}",
            f"{cost:.2f} ({prescribed / cost:.2f}x at 3.5; drawn: {length:.2f})",
            cost <= prescribed / 2.3,
        )
    )
    found.records.append(report.record())


def overhead(pair: Pair, found: Measured) -> None:
    shared = {"max_new_tokens": pair.scale.tokens}
    prompts = bundled_prompts(Text.python, pair.scale.prompts, 1, pair.target.config.vocab_size)
    with benchmark.endless(pair.target):
        ids = [prompt["input_ids"] for prompt in prompts]
        parts = breakdown(pair.target, ids, "auto", **shared)
    what = "outside target forward and draft op, per step, batch 1, greedy, auto"
    found.at_most(what, pair.dtype, parts.outside / 1e3, 0.5, "ms", 3)
    found.records.append({"breakdown": asdict(parts)})


def memory(scale: Scale, found: Measured, target: str = "500m", context: int = 2048) -> None:
    report = bench_memory.compare(target, "bfloat16", context, 64, scale.repeats)
    what = f"memory, extra over plain, {target} shape, {context} tokens of context"
    mib = bench_memory.MIB
    found.at_most(
        what, "bfloat16", report["extra_bytes"] / mib, report["bound_bytes"] / mib, "MiB", 1
    )
    found.records.append({"memory": report})


def training(folder: Path, found: Measured) -> None:
    """Add a row from the training record of the bundled head; nothing is trained here."""
    what = "training the bundled head from scratch on two cores (its own record)"
    path = folder / "history.jsonl"
    if not path.exists():
        row = Row(what, "float32", "< 60 min", f"no {path}", None)
    else:
        seconds = [json.loads(line)["seconds"] for line in path.read_text().splitlines()]
        minutes = sum(seconds) / 60
        measured = f"{minutes:.1f} min, {len(seconds)} steps"
        row = Row(what, "float32", "< 60 min", measured, minutes < 60)
    found.rows.append(row)


def measure(
    parts: list[Part],
    models: list[Model],
    batches: list[int],
    dtypes: list[str],
    scale: Scale,
    folder: Path,
) -> Iterator[tuple[str, Measured]]:
    """Yield the name of each part after it was measured, with all results so far."""
    found = Measured()
    for dtype in dtypes:
        pair = Pair(dtype, scale)
        if Part.speed in parts:
            speed(pair, found)
            yield f"speed, {dtype}", found
        if Part.never_slower in parts:
            for model in models:
                for batch in batches:
                    never_slower(model, dtype, batch, scale, found)
                    yield f"never-slower, {model.value}, batch {batch}, {dtype}", found
        if Part.random_text in parts:
            random_text(pair, found)
            yield f"random-text, {dtype}", found
        if Part.overhead in parts:
            overhead(pair, found)
            yield f"overhead, {dtype}", found
        if Part.synthetic in parts:
            synthetic(dtype, scale, found)
            yield f"synthetic, {dtype}", found
    if Part.memory in parts:
        memory(scale, found)
        yield "memory", found
    if Part.training in parts:
        training(folder, found)
        yield "training", found


def main(
    only: Annotated[list[Part], typer.Option(help="parts of the table; may be repeated")] = [],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="may be repeated")] = ["float32", "bfloat16"],  # noqa: B006
    model: Annotated[
        list[Model],
        typer.Option(help="target of never-slower; may be repeated"),
    ] = [*Model],  # noqa: B006
    batch: Annotated[
        list[int], typer.Option(help="batch size of never-slower; may be repeated")
    ] = [1, 4],  # noqa: B006
    training_folder: Annotated[
        Path, typer.Option(help="training record of the bundled head")
    ] = TRAINING,
    repetitions: Annotated[
        int, typer.Option(help="repetitions of all prompts in never-slower")
    ] = Scale.repetitions,
    quick: Annotated[
        bool, typer.Option(help="one prompt and few tokens, to test the script")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="write OUT.md and OUT.json")] = None,
    add: Annotated[
        bool, typer.Option(help="keep the rows of OUT.json that this run does not measure")
    ] = False,
) -> None:
    console = Console(highlight=False)
    scale = Scale.quick() if quick else Scale(repetitions=repetitions)
    found, shown = Measured(), 0
    for part, found in measure(only or list(Part), model, batch, dtype, scale, training_folder):
        console.print(part, style="bold")
        for row in found.rows[shown:]:
            console.print("  " + " | ".join(row.cells), markup=False, soft_wrap=True)
        shown = len(found.rows)
    machine = machine_line(torch.device("cpu"), f"transformers {transformers.__version__}")
    cells = [row.cells for row in found.rows]
    console.print(machine, format_table(HEADER, cells, left=HEADER), sep="\n", soft_wrap=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.with_suffix(".json")
        rows, records = found.rows, found.records
        if add and file.exists():
            kept = json.loads(file.read_text())
            measured = {(row.what, row.dtype) for row in rows}
            old = [Row(**row) for row in kept["rows"]]
            rows = [row for row in old if (row.what, row.dtype) not in measured] + rows
            records = kept["records"] + records
        cells = [row.cells for row in rows]
        out.with_suffix(".md").write_text(_markdown(machine, cells, quick))
        report = {
            "machine": machine,
            "scale": asdict(scale),
            "rows": [asdict(row) for row in rows],
            "records": records,
        }
        file.write_text(json.dumps(report, indent=1) + "\n")


def _markdown(machine: str, cells: list[tuple[str, ...]], quick: bool) -> str:
    notes = [
        "`python profiling/bench_goals.py`. The goals are for float32, and for bfloat16 with the 135M shape;",
        "the other dtype is reported as well. Intervals are 95 %, by bootstrap over prompts, and over",
        "repetitions where a drafter is compared with plain decoding in pairs.",
        "*Synthetic acceptance*: random weights and prescribed acceptance; it shows the cost of speculation,",
        "not the quality of a drafter.",
    ]
    if quick:
        notes.append("**A quick run, to test the script: the numbers are not meaningful.**")
    return "\n".join(
        ["# Goals on a CPU", "", machine, "", format_markdown(HEADER, cells), "", *notes, ""]
    )


if __name__ == "__main__":
    typer.run(main)
