"""Measure tokens per second of Hugging Face's and our ways to generate, in turn.

    python profiling/bench_generate.py                          # bundled models, float32, batch 1
    python profiling/bench_generate.py --dtype bfloat16 --batch 1 --batch 4 --out build/bfloat16
    python profiling/bench_generate.py --temperature 0.8        # sampled text repeats itself less
    python profiling/bench_generate.py --prompts random         # unpredictable text
    python profiling/bench_generate.py --target 135m --dtype bfloat16 --context 128 --context 2048

Prints a table per batch size and context length; with ``--out`` also writes ``<out>.json`` and ``<out>.png``.
Ratios compare medians over prompts with Hugging Face ``generate`` in the same run. Greedy texts are compared
with Hugging Face's; where they differ, the first difference is classified as near-tie or bug.

The targets ``135m`` and ``500m`` and their heads have random weights: the benchmark measures *cost*, and
acceptance is prescribed ("synthetic acceptance", :mod:`specdec_ext.evaluate.synthetic`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from random_targets import SHAPES, head_of, random_head_of, random_prompts, random_target
from rich.console import Console

import specdec_ext
from specdec_ext import assets
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import HF, HF_ASSISTED, HF_LOOKUP, PLAIN, Contestant, Prompt
from specdec_ext.evaluate.synthetic import constant_acceptance

RANDOM_LENGTH = 128  # tokens of random prompts for the bundled target
AUTO, HEAD = "specdec auto", "specdec head"
ADVERSARY = "specdec adversary"  # a head's drafts, in which each token is replaced by a wrong one


class Target(str, Enum):
    """Target models."""

    bundled = "bundled"
    small = "135m"
    large = "500m"


class Text(str, Enum):
    """Kinds of prompts for the bundled target."""

    python = "python"
    random = "random"


# Makes a contestant for a list of prompts; some contestants need the plain text of the prompts first.
Maker = Callable[[list[Prompt]], Contestant]


def bundled_contestants(target: Any, draft: Any, shared: dict[str, Any]) -> dict[str, Maker]:
    """Makers by name. The adversary uses the bundled head, or a random one if there is none."""
    head = assets.load_head() if (assets.FOLDER / "tiny-python-head").is_dir() else None

    def ours(drafter: Any, **keywords: Any) -> Maker:
        return lambda prompts: benchmark.ours(target, drafter, shared, **keywords)

    def theirs(**keywords: Any) -> Maker:
        return lambda prompts: benchmark.hugging_face(target, shared, **keywords)

    return {
        HF: theirs(),
        HF_LOOKUP: theirs(prompt_lookup_num_tokens=benchmark.LOOKUP_TOKENS),
        HF_ASSISTED: theirs(assistant_model=draft),
        PLAIN: ours(None),
        AUTO: ours("auto"),
        ADVERSARY: lambda prompts: benchmark.synthetic(
            target, specdec_ext.HeadDrafter(head or head_of(target)), [0.0] * 8, prompts, shared
        ),
        **({HEAD: ours(specdec_ext.HeadDrafter(head))} if head else {}),
        **(
            {f"{HEAD}, fixed": ours(specdec_ext.HeadDrafter(head), speculation="fixed")}
            if head
            else {}
        ),
        "specdec n-gram": ours("ngram"),
        "specdec n-gram tree": ours(specdec_ext.NgramDrafter(num_draft_tokens=12, num_branches=3)),
        "specdec suffix": ours("suffix"),
        "specdec lookahead": ours("lookahead"),
        "specdec draft model": ours(draft),
        "specdec n-gram + draft model": ours(
            specdec_ext.CombinedDrafter(
                specdec_ext.NgramDrafter(), specdec_ext.DraftModelDrafter(draft)
            )
        ),
    }


def random_contestants(
    name: str, target: Any, shared: dict[str, Any], lengths: list[float], depth: int
) -> dict[str, Maker]:
    """Hugging Face, plain decoding, and chains of a random head with prescribed acceptance."""
    drafter = specdec_ext.HeadDrafter(
        random_head_of(name, target.dtype), tree=specdec_ext.TreeConfig(depth=depth)
    )

    def synthetic(acceptance: list[float], **keywords: Any) -> Maker:
        return lambda prompts: benchmark.synthetic(
            target, drafter, acceptance, prompts, shared, **keywords
        )

    makers: dict[str, Maker] = {
        HF: lambda prompts: benchmark.hugging_face(target, shared),
        PLAIN: lambda prompts: benchmark.ours(target, None, shared),
    }
    for length in lengths:
        asked, shares = synthetic_name(length, depth), constant_acceptance(length, depth)
        makers[asked] = synthetic(shares, speculation="fixed")
        makers[f"{asked}, auto"] = synthetic(shares)
    return {**makers, ADVERSARY: synthetic([0.0] * depth)}


def synthetic_name(mean_acceptance_length: float, depth: int) -> str:
    return f"specdec, synthetic acceptance {mean_acceptance_length:g} at chain {depth}"


def chosen(makers: dict[str, Maker], names: list[str], batch: int) -> tuple[list[str], dict]:
    """Names of the contestants that take part; for each other requested one, why it does not.

    Raises:
        typer.BadParameter: for an unknown name.
    """
    unknown = sorted(set(names) - set(makers))
    if unknown:
        raise typer.BadParameter(f"no contestant {unknown}; there are {list(makers)}")
    asked = [name for name in makers if not names or name in names or name == HF]
    single = {HF_LOOKUP, HF_ASSISTED} if batch > 1 else set()
    return (
        [name for name in asked if name not in single],
        {
            name: "transformers supports it for batch size 1 only"
            for name in asked
            if name in single
        },
    )


def bundled_prompts(text: Text, count: int, batch: int, vocab_size: int) -> list[Prompt]:
    if text is Text.random:
        return random_prompts(vocab_size, batch, RANDOM_LENGTH, count)
    texts = [prompt["prompt"] for prompt in assets.held_out_prompts()[: max(count, batch)]]
    return benchmark.batches(assets.load_tokenizer(), texts, batch)


def main(
    target: Target = Target.bundled,
    dtype: str = "float32",
    batch: Annotated[list[int], typer.Option(help="may be repeated")] = [1],  # noqa: B006
    context: Annotated[
        list[int],
        typer.Option(help="tokens per prompt, for targets with random weights; may be repeated"),
    ] = [128],  # noqa: B006
    text: Annotated[
        Text, typer.Option("--prompts", help="kind of prompts for the bundled target")
    ] = Text.python,
    count: Annotated[int, typer.Option(help="number of prompts")] = 10,
    max_new_tokens: int = 128,
    temperature: Annotated[float, typer.Option(help="sampling temperature; 0: greedy")] = 0.0,
    contestant: Annotated[
        list[str], typer.Option(help="run only this one and HF generate; may be repeated")
    ] = [],  # noqa: B006
    acceptance: Annotated[
        list[float],
        typer.Option(
            help="synthetic mean acceptance length, for targets with random weights; may be repeated"
        ),
    ] = [3.5],  # noqa: B006
    depth: Annotated[
        int, typer.Option(help="length of the chains, for targets with random weights")
    ] = 7,
    repeats: Annotated[int, typer.Option(help="calls per prompt, of which the median is used")] = 3,
    out: Annotated[Path | None, typer.Option(help="write OUT.json and OUT.png")] = None,
) -> None:
    shared = benchmark.generation_kwargs(max_new_tokens, temperature)
    kind, settings = getattr(torch, dtype), {"target": target.value}
    draft = None
    if target is Target.bundled:
        model, draft = assets.load_target(kind), assets.load_draft(kind)
        makers = bundled_contestants(model, draft, shared)
        settings["text"] = text.value
    else:
        model = random_target(target.value, kind)
        makers = random_contestants(target.value, model, shared, acceptance, depth)
        settings["head's vocabulary"] = str(SHAPES[target.value][2])
    console = Console(width=150, highlight=False)
    reports = []
    for rows in batch:
        names, left_out = chosen(makers, contestant, rows)
        for length in context if target is not Target.bundled else [None]:
            if length is None:
                prompts = bundled_prompts(text, count, rows, model.config.vocab_size)
            else:
                prompts = random_prompts(model.config.vocab_size, rows, length, count)
                settings["context"] = str(length)
            with benchmark.endless(model, *([draft] if draft else [])):
                contestants = {name: makers[name](prompts) for name in names}
                report = benchmark.race(
                    model, contestants, prompts, shared, repeats, settings=settings
                )
            report.left_out = left_out
            if target is Target.bundled and HEAD not in makers:
                report.left_out[HEAD] = "the bundled target has no head"
            console.print(*report.tables(), sep="\n")
            for note in report.notes():
                console.print(note)
            reports.append(report)
    console.print(reports[0].machine)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        records = [report.record() for report in reports]
        out.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n")
        benchmark.plot(reports, out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
