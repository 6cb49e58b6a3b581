"""``specdec bench``: how fast is generation with each drafter, against Hugging Face's ways?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_ext.cli._common import (
    DRAFTER_HELP,
    DeviceOption,
    Dtype,
    DtypeOption,
    MaxNewTokensOption,
    Model,
    ModelArgument,
    PromptsOption,
    load_drafter,
    load_target,
    read_prompts,
    user_errors,
    warn_if_busy,
)
from specdec_ext.cli._console import PlainConsole
from specdec_ext.preflight.extras import require
from specdec_ext.preflight.outputs import writable_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec_ext.benchmark import Report
    from specdec_ext.breakdown import Breakdown


def bench(
    model: ModelArgument = None,
    drafter: Annotated[
        list[str],
        typer.Option(
            "--drafter",
            help=f"{DRAFTER_HELP} May be repeated.",
        ),
    ] = ["auto"],  # noqa: B006  (typer copies it)
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts per call.")] = 1,
    prompts: PromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")
    ] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Calls per prompt; the median counts.")] = 3,
    assisted: Annotated[
        str | None,
        typer.Option(
            "--assisted", help="Draft model for Hugging Face's assisted decoding, or draft."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the whole record here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Write a bar chart here (PNG).")
    ] = None,
    breakdown: Annotated[
        bool,
        typer.Option(
            "--breakdown",
            help="Where the time of a step goes with each drafter; beside --plot a second chart.",
        ),
    ] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Measure tokens per second of every way to generate, in turn on every prompt, medians.

    Every text has --max-new-tokens tokens: ends of sequence are not heeded. Ratios are to Hugging Face
    generate, with 95 % intervals over prompts; break-even is what a step costs in steps of plain decoding.
    """
    from specdec_ext import benchmark

    with user_errors():
        _check_outputs(json_file, plot_file)
    target, tokenizer = load_target(model, dtype, device)
    console = PlainConsole()
    with user_errors():
        if prompts is None and model is not None:
            raise ValueError("give --prompts FILE: the bundled ones are for the bundled model")
        texts = _bundled_texts() if prompts is None else [text for _, text in read_prompts(prompts)]
        encoded = benchmark.batches(tokenizer, texts, batch, target.device)
        drafters = {name: load_drafter(name, target, tokenizer) for name in drafter}
        assistant = None if assisted is None else _assistant(assisted, target, tokenizer)
        warn_if_busy(console)
        with console.status("warming up") as status:
            report = benchmark.compare(
                target,
                encoded,
                drafters,
                assistant=assistant,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                repeats=repeats,
                on_call=lambda name: status.update(f"measuring {name}"),
            )
        steps = _breakdowns(target, encoded, drafters, max_new_tokens) if breakdown else []
    if json_file is not None:
        record = {**report.record(), "breakdowns": [asdict(each) for each in steps]}
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    _show(console, report)
    for each in steps:
        console.print(each.table(), markup=False, soft_wrap=True)
    if plot_file is not None:
        benchmark.plot([report], plot_file)
        if steps:
            steps[0].plot(plot_file.with_stem(f"{plot_file.stem}_breakdown"), steps[1:])


def _check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Before minutes of measuring, what would fail at their end."""
    if json_file is not None:
        writable_file(json_file, "--json")
    if plot_file is not None:
        writable_file(plot_file, "--plot")
        require("matplotlib", "--plot")


def _breakdowns(
    target: Model, prompts: list[Any], drafters: dict[str, Any], max_new_tokens: int
) -> list[Breakdown]:
    """Of greedy decoding without a drafter and with each; of padded batches the first."""
    from specdec_ext.breakdown import breakdown

    inputs: dict[str, Any] = {}
    if len(prompts[0]["input_ids"]) > 1:
        prompts, inputs = prompts[:1], {"attention_mask": prompts[0]["attention_mask"]}
    ids = [prompt["input_ids"] for prompt in prompts]
    proposers = {"none": None, **drafters}.values()
    return [breakdown(target, ids, each, max_new_tokens, **inputs) for each in proposers]


def _bundled_texts() -> list[str]:
    from specdec_ext import assets

    return [each["prompt"] for each in assets.held_out_prompts()]


def _assistant(name: str, target: Model, tokenizer: PreTrainedTokenizerBase) -> Any:
    from specdec_ext import DraftModelDrafter

    found = load_drafter(name, target, tokenizer)
    if not isinstance(found, DraftModelDrafter):
        raise ValueError(
            f"--assisted {name}: expected a draft model; transformers assists with models only"
        )
    return found.model


def _show(console: PlainConsole, report: Report) -> None:
    from specdec_ext.benchmark import position_table

    console.sentence(report.machine)
    console.print(report.table())
    for series in report.series.values():
        if series.total("drafts"):
            console.print(position_table(series))
    for note in report.notes():
        console.sentence(note)
