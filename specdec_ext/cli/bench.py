"""``specdec bench``: measure the speed of each drafter against Hugging Face's ways to generate."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_ext.cli.shared.common import (
    DRAFTER_HELP,
    DeviceOption,
    DtypeOption,
    MaxNewTokensOption,
    Model,
    ModelArgument,
    PromptsOption,
    SpeculationOption,
    check_outputs,
    load_drafter,
    load_target,
    read_prompts,
    user_errors,
    warn_if_busy,
)
from specdec_ext.cli.shared.shape import DraftLengthOption, TreeOption, shape_of
from specdec_ext.display.console import PlainConsole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec_ext import TreeConfig
    from specdec_ext.evaluate.benchmark import Report
    from specdec_ext.evaluate.breakdown import Breakdown


def bench(
    model: ModelArgument = None,
    drafter: Annotated[
        list[str], typer.Option("--drafter", help=f"{DRAFTER_HELP} May be repeated.")
    ] = ["auto"],  # noqa: B006  (typer copies it)
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts per call.")] = 1,
    prompts: PromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")
    ] = 0.0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Calls per prompt, of which the median is used.")
    ] = 3,
    speculation: SpeculationOption = "auto",
    draft_length: DraftLengthOption = None,
    tree: TreeOption = None,
    assisted: Annotated[
        str | None,
        typer.Option(
            "--assisted",
            help="Also measure Hugging Face's assisted decoding with this draft model (folder, hub id or "
            "draft).",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all results to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, help="Write a bar chart to this file (PNG)."),
    ] = None,
    breakdown: Annotated[
        bool,
        typer.Option(
            "--breakdown",
            help="Show where the time of a step goes for each drafter; with --plot, in a second chart.",
        ),
    ] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Compare the speed of each drafter, plain decoding and Hugging Face generate.

    The ways to generate take turns on every prompt, and the medians are reported. End-of-sequence tokens are
    ignored, so that every text has --max-new-tokens tokens. Ratios are relative to Hugging Face generate,
    with 95 % confidence intervals over prompts. Break-even is the cost of a speculative step in steps of
    plain decoding: speculation pays if a step emits more tokens than that.
    """
    from specdec_ext.evaluate import benchmark

    with user_errors():
        check_outputs(json_file, plot_file)
        if prompts is None and model is not None:
            raise ValueError("pass --prompts FILE: the bundled prompts are for the bundled model")
        texts = _bundled_texts() if prompts is None else [text for _, text in read_prompts(prompts)]
    target, tokenizer = load_target(model, dtype, device)
    console = PlainConsole()
    with user_errors():
        encoded = benchmark.batches(tokenizer, texts, batch, target.device)
        shape = shape_of(draft_length, tree)
        drafters = {
            name: _shaped(name, load_drafter(name, target, tokenizer), shape) for name in drafter
        }
        assistant = None if assisted is None else _assistant(assisted, target, tokenizer)
        warn_if_busy(console)
        report = benchmark.compare(
            target,
            encoded,
            drafters,
            assistant=assistant,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            repeats=repeats,
            speculation=speculation,
        )
        steps = _breakdowns(target, encoded, drafters, max_new_tokens) if breakdown else []
    if json_file is not None:
        record = {**report.record(), "breakdowns": [asdict(each) for each in steps]}
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    _show(console, report)
    for each in steps:
        console.blocks(*each.sentences(), *each.tables())
    if plot_file is not None:
        benchmark.plot([report], plot_file)
        if steps:
            steps[0].plot(plot_file.with_stem(f"{plot_file.stem}_breakdown"), steps[1:])


def _breakdowns(
    target: Model, prompts: list[Any], drafters: dict[str, Any], max_new_tokens: int
) -> list[Breakdown]:
    """Break down greedy decoding without a drafter and with each one; with padded batches, only the first."""
    from specdec_ext.evaluate.breakdown import breakdown

    inputs: dict[str, Any] = {}
    if len(prompts[0]["input_ids"]) > 1:
        prompts, inputs = prompts[:1], {"attention_mask": prompts[0]["attention_mask"]}
    ids = [prompt["input_ids"] for prompt in prompts]
    return [
        breakdown(target, ids, each, max_new_tokens, name, **inputs)
        for name, each in {"none": None, **drafters}.items()
    ]


def _shaped(name: str, drafter: Any, shape: TreeConfig | None) -> Any:
    """Return a drafter that drafts in this shape.

    Raises:
        ValueError: if the drafter cannot draft in it.
    """
    from specdec_ext import DraftModelDrafter, HeadDrafter, MedusaDrafter, NgramDrafter

    if shape is None or drafter is None:
        return drafter
    if isinstance(drafter, HeadDrafter):
        return HeadDrafter(drafter.head, shape, drafter.weights)
    if isinstance(drafter, MedusaDrafter):
        return MedusaDrafter(drafter.heads, shape)
    if shape.top_k == 1 and isinstance(drafter, (NgramDrafter, DraftModelDrafter)):
        drafter.num_draft_tokens = shape.depth
        return drafter
    option = "--draft-length" if shape.top_k == 1 else "--tree"
    able = "ngram, draft models and draft heads" if shape.top_k == 1 else "draft heads"
    raise ValueError(
        f"{option} works with {able}, not with --drafter {name}; leave out one of the two options"
    )


def _bundled_texts() -> list[str]:
    from specdec_ext import assets

    return [each["prompt"] for each in assets.held_out_prompts()]


def _assistant(name: str, target: Model, tokenizer: PreTrainedTokenizerBase) -> Any:
    from specdec_ext import DraftModelDrafter

    found = load_drafter(name, target, tokenizer)
    if not isinstance(found, DraftModelDrafter):
        raise ValueError(
            f"--assisted {name}: expected a draft model; assisted decoding takes no other drafter"
        )
    return found.model


def _show(console: PlainConsole, report: Report) -> None:
    from specdec_ext.evaluate.benchmark import position_table

    console.sentence(report.machine)
    drafted = [series for series in report.series.values() if series.total("drafts")]
    console.blocks(*report.tables(), *map(position_table, drafted))
    for note in report.notes():
        console.sentence(note)
