"""Measure tokens per second of Hugging Face's and our ways to generate, in turn.

    python profiling generate                            # bundled models, float32, batch 1
    python profiling generate --dtype bfloat16 --batch 1 --batch 4 --out build/bfloat16
    python profiling generate --temperature 0.8          # sampled text repeats itself less
    python profiling generate --contestant "specdec head" --shape 3 --shape 5 --shape 5x4x16
    python profiling generate --prompts random           # unpredictable text
    python profiling generate --target 500m --context 128 --context 4096 --count 3 --acceptance 3.5
    python profiling generate --weights int4             # of the target; Hugging Face computes with the same
    python profiling generate --busy 1 --threads 2       # beside a process that never rests

- Contestants continue every prompt in turn. The median of the calls with a prompt is used; ratios compare
  medians over prompts with Hugging Face ``generate``. All texts have one length, because end-of-sequence
  tokens are ignored. Tokens per second count the whole call, the prompt included.
- In brackets: the 95 % interval of the ratio, by bootstrap over prompts. It shows how much prompts matter,
  not what a busy machine does. The JSON also has Spec-Bench's speed-up (``ratio_of_means``).
- Acceptance length counts the bonus token, over steps with a draft; emitted per step is over all steps.
  Break-even is the cost of a step in steps of plain decoding: speculation pays if a step emits more.
- Peak MiB is the peak of the process during a call, models included; on a GPU, the peak of its tensors.
- Greedy texts are compared with Hugging Face's; the first difference is classified as near-tie or bug.

The targets 135m, 500m and 8b have the sizes of SmolLM2-135M, Qwen2.5-0.5B and Llama-3.1-8B. They and their
heads have random weights: the benchmark measures *cost*, and acceptance is prescribed ("synthetic
acceptance", specdec_ext/evaluate/synthetic.py). The draft vocabulary has 8,192, 16,384 and 32,000 tokens; it
is most of a draft's cost. On a GPU, Hugging Face's static cache takes part, for which transformers compiles
the model, and our ways without recorded passes:

    python profiling generate --target 8b --dtype bfloat16 --count 1 --max-new-tokens 64
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from baselines.random_targets import SHAPES, random_head_of, random_prompts, random_target
from rich.console import Console

import specdec_ext
from bench.runner import add_device, parse, parser
from specdec_ext import assets
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import (
    HF,
    HF_ASSISTED,
    HF_LOOKUP,
    HF_STATIC,
    PLAIN,
    Contestant,
    Prompt,
)
from specdec_ext.evaluate.synthetic import constant_acceptance

BUNDLED, PYTHON, RANDOM = "bundled", "python", "random"
RANDOM_LENGTH = 128  # tokens of random prompts for the bundled target
AUTO, HEAD = "specdec auto", "specdec head"
NO_GRAPHS = ", no graphs"
ADVERSARY = "specdec adversary"  # a head's drafts, in which each token is replaced by a wrong one

# Makes a contestant for a list of prompts; some contestants need the plain text of the prompts first.
Maker = Callable[[list[Prompt]], Contestant]


def bundled_contestants(
    target: Any, draft: Any, shared: dict[str, Any], shapes: Sequence[str] = ()
) -> dict[str, Maker]:
    """Makers by name; the head also drafts each of ``shapes`` (:func:`tree_config`) in every step."""
    head = specdec_ext.HeadDrafter(assets.load_head())

    def ours(drafter: Any, **keywords: Any) -> Maker:
        return lambda prompts: benchmark.ours(target, drafter, shared, **keywords)

    def theirs(**keywords: Any) -> Maker:
        return lambda prompts: benchmark.hugging_face(target, shared, **keywords)

    ngram, model = specdec_ext.NgramDrafter(), specdec_ext.DraftModelDrafter(draft)
    return {
        HF: theirs(),
        HF_LOOKUP: theirs(prompt_lookup_num_tokens=benchmark.LOOKUP_TOKENS),
        HF_ASSISTED: theirs(assistant_model=draft),
        PLAIN: ours(None),
        AUTO: ours("auto"),
        ADVERSARY: lambda prompts: benchmark.synthetic(target, head, [0.0] * 8, prompts, shared),
        HEAD: ours(head),
        f"{HEAD}, fixed": ours(head, speculation="fixed"),
        **{
            shaped_name(shape): ours(
                specdec_ext.HeadDrafter(head.head, tree_config(shape)), speculation="fixed"
            )
            for shape in shapes
        },
        "specdec n-gram": ours("ngram"),
        "specdec n-gram tree": ours(specdec_ext.NgramDrafter(num_draft_tokens=12, num_branches=3)),
        "specdec suffix": ours("suffix"),
        "specdec lookahead": ours("lookahead"),
        "specdec draft model": ours(draft),
        "specdec n-gram + draft model": ours(specdec_ext.CombinedDrafter(ngram, model)),
    }


def tree_config(shape: str) -> specdec_ext.TreeConfig:
    """The shape that --shape asks for: a chain, such as ``5``, or a dynamic tree, such as ``5x4x16``.

    Raises:
        SystemExit: for another text.
    """
    numbers = shape.split("x")
    if len(numbers) not in (1, 3) or not all(map(str.isdecimal, numbers)):
        raise SystemExit(f"--shape {shape}: expected DEPTH or DEPTHxTOP_KxNODES, such as 5x4x16")
    return specdec_ext.TreeConfig(*map(int, numbers))


def shaped_name(shape: str) -> str:
    return f"{HEAD}, {'tree' if 'x' in shape else 'chain'} {shape}"


def random_contestants(
    name: str,
    target: Any,
    shared: dict[str, Any],
    lengths: list[float],
    depth: int,
    recorded: bool = False,
) -> dict[str, Maker]:
    """Hugging Face, plain decoding, and chains of a random head with prescribed acceptance.

    Args:
        lengths: the mean acceptance lengths.
        depth: length of the chains.
        recorded: whether Hugging Face's static cache and our ways without recorded passes take part, too.
    """
    drafter = specdec_ext.HeadDrafter(
        random_head_of(name, target.dtype, target.device), tree=specdec_ext.TreeConfig(depth=depth)
    )

    def synthetic(acceptance: list[float], **keywords: Any) -> Maker:
        return lambda prompts: benchmark.synthetic(
            target, drafter, acceptance, prompts, shared, **keywords
        )

    makers: dict[str, Maker] = {
        HF: lambda prompts: benchmark.hugging_face(target, shared),
        PLAIN: lambda prompts: benchmark.ours(target, None, shared),
    }
    if recorded:
        makers[HF_STATIC] = lambda prompts: benchmark.hugging_face(
            target, shared, cache_implementation="static"
        )
        makers[PLAIN + NO_GRAPHS] = lambda prompts: benchmark.ours(
            target, None, shared, graphs=False
        )
    for length in lengths:
        asked, shares = synthetic_name(length, depth), constant_acceptance(length, depth)
        makers[asked] = synthetic(shares, speculation="fixed")
        if recorded:
            makers[asked + NO_GRAPHS] = synthetic(shares, speculation="fixed", graphs=False)
        makers[f"{asked}, auto"] = synthetic(shares)
    return {**makers, ADVERSARY: synthetic([0.0] * depth)}


def synthetic_name(mean_acceptance_length: float, depth: int) -> str:
    return f"specdec, synthetic acceptance {mean_acceptance_length:g} at chain {depth}"


def chosen(makers: dict[str, Maker], names: list[str], batch: int) -> tuple[list[str], dict]:
    """Names of the contestants that take part; for each other requested one, why it does not.

    Raises:
        SystemExit: for an unknown name.
    """
    if unknown := sorted(set(names) - set(makers)):
        raise SystemExit(f"--contestant: no contestant {unknown}; there are {list(makers)}")
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


def bundled_prompts(
    text: str, count: int, batch: int, vocab_size: int, device: str = "cpu"
) -> list[Prompt]:
    if text == RANDOM:
        return random_prompts(vocab_size, batch, RANDOM_LENGTH, count, device)
    texts = [prompt["prompt"] for prompt in assets.held_out_prompts()[: max(count, batch)]]
    return benchmark.batches(assets.load_tokenizer(), texts, batch, device)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    given = parser(
        __doc__, 3, "calls per prompt, of which the median is used", "OUT.json and OUT.png"
    )
    many: dict[str, Any] = {"action": "append", "default": []}
    given.add_argument("--target", choices=(BUNDLED, *SHAPES), default=BUNDLED)
    given.add_argument("--dtype", default="float32")
    given.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile (0)")
    given.add_argument("--weights", choices=("int8", "int4"), help="of the target, on the CPU")
    add_device(given)
    given.add_argument("--batch", type=int, **many, help="default 1; may be repeated")
    given.add_argument("--count", type=int, default=10, help="number of prompts (default 10)")
    given.add_argument("--max-new-tokens", type=int, default=128)
    given.add_argument(
        "--temperature", type=float, **many, help="0, the default: greedy; may be repeated"
    )
    given.add_argument("--contestant", **many, help="only this and HF generate; may be repeated")
    given.add_argument(
        "--prompts", choices=(PYTHON, RANDOM), default=PYTHON, help="of the bundled target"
    )
    given.add_argument(
        "--shape",
        **many,
        help="drafts of the bundled head, in every step: a chain, such as 5, or a dynamic tree of "
        "DEPTHxTOP_KxNODES, such as 5x4x16; may be repeated",
    )
    others = given.add_argument_group("targets with random weights")
    others.add_argument("--context", type=int, **many, help="tokens per prompt (128); repeatable")
    others.add_argument(
        "--acceptance", type=float, **many, help="mean acceptance length (3.5); may be repeated"
    )
    others.add_argument("--depth", type=int, default=7, help="length of the chains (default 7)")
    return parse(given, arguments)


def contestants_for(
    options: argparse.Namespace, models: Sequence[Any], shared: dict[str, Any]
) -> dict[str, Maker]:
    """Makers of the contestants that generate with the keywords ``shared``."""
    if options.target == BUNDLED:
        target, draft = models
        return bundled_contestants(target, draft, shared, options.shape)
    if options.shape:
        raise SystemExit("--shape is for the bundled head; pass --depth for a random target")
    lengths = options.acceptance or [3.5]
    recorded = options.device == "cuda"
    return random_contestants(options.target, models[0], shared, lengths, options.depth, recorded)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run so many processes that never wait, as others would use a shared machine."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    kind, settings = getattr(torch, options.dtype), {"target": options.target}
    is_bundled, device = options.target == BUNDLED, options.device
    models: list[Any]
    if is_bundled:
        models = [each(kind).to(device) for each in (assets.load_target, assets.load_draft)]
        settings["text"] = options.prompts
    else:
        models = [random_target(options.target, kind, device)]
        settings["head's vocabulary"] = str(SHAPES[options.target][2])
    model, vocab_size = models[0], models[0].config.vocab_size
    if options.weights:
        specdec_ext.quantize(model, options.weights)
        settings["weights"] = options.weights
    if options.busy:
        settings["busy processes"] = str(options.busy)
    console = Console(width=150, highlight=False)
    reports = []
    contexts = [None] if is_bundled else options.context or [128]
    for rows, temperature, length in product(
        options.batch or [1], options.temperature or [0.0], contexts
    ):
        shared = benchmark.generation_kwargs(options.max_new_tokens, temperature)
        makers = contestants_for(options, models, shared)
        shaped = [shaped_name(shape) for shape in options.shape]
        asked = options.contestant and [*options.contestant, *shaped]
        names, left_out = chosen(makers, asked, rows)
        if length is None:
            prompts = bundled_prompts(options.prompts, options.count, rows, vocab_size, device)
        else:
            prompts = random_prompts(vocab_size, rows, length, options.count, device)
            settings["context"] = str(length)
        with benchmark.endless(*models), busy_processes(options.busy):
            contestants = {name: makers[name](prompts) for name in names}
            report = benchmark.race(
                model, contestants, prompts, shared, options.repeats, settings=settings
            )
        report.left_out = left_out
        console.print(*report.tables(), *report.details(), sep="\n")
        for note in report.notes():
            console.print(note)
        reports.append(report)
    console.print(reports[0].machine)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        records = [report.record() for report in reports]
        options.out.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n")
        benchmark.plot(reports, options.out.with_suffix(".png"))
