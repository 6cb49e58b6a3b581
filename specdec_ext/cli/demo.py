"""``specdec demo``: show speculation on the bundled models, then measure it against Hugging Face.

All numbers come from one run: after a warm-up, the ways to generate take turns on every prompt with the same
keywords. The medians over prompts are reported.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich._export_format import CONSOLE_SVG_FORMAT

from specdec_ext.cli.shared.common import (
    DeviceOption,
    DtypeOption,
    MaxNewTokensOption,
    Model,
    describe,
    encode,
    load_drafter,
    load_target,
    user_errors,
    warn_if_busy,
)
from specdec_ext.cli.shared.stream import TextStreamer, legend
from specdec_ext.display import Table
from specdec_ext.display.console import PlainConsole
from specdec_ext.display.progress import tracked
from specdec_ext.preflight.outputs import writable_file

if TYPE_CHECKING:
    from torch import LongTensor
    from transformers import PreTrainedTokenizerBase

    from specdec_ext import ComparedRuns
    from specdec_ext.evaluate.benchmark import Series

HF = "HF generate"
HF_LOOKUP = "HF prompt lookup (10)"
OURS = "specdec, drafter={}"
# n-gram lookup, the bundled head, and both together.
DRAFTERS = ["ngram", "head", "auto"]
# The prompt whose completion is streamed. It is sampled: greedy text of a small model repeats itself.
STREAMED = "torch/testing/_comparison.py"
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_k": 0, "seed": 1}
STREAMED_TOKENS = 110
SHOWN_PROMPT_LINES = 6
# rich's SVG template without its web fonts, so that the picture loads nothing.
_SVG = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def demo(
    prompts: Annotated[
        int, typer.Option(min=0, help="Number of bundled prompts to measure; 0: all of them.")
    ] = 10,
    max_new_tokens: MaxNewTokensOption = 128,
    drafter: Annotated[
        list[str],
        typer.Option(
            "--drafter",
            help="Drafter, as for specdec generate; may be repeated. The last one is streamed.",
        ),
    ] = DRAFTERS,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    stream: Annotated[bool, typer.Option(help="Stream a completion before measuring.")] = True,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", dir_okay=False, help="Draw the completion in colour to this file (SVG)."
        ),
    ] = None,
) -> None:
    """Stream a completion with accepted drafts marked, then compare speed with Hugging Face generate."""
    from specdec_ext import assets
    from specdec_ext.evaluate.benchmark import machine_line, position_table, repetition_note

    if picture is not None:
        with user_errors():
            writable_file(picture, "--picture")
    proposers = {}
    with tracked("loading the bundled models", 1 + len(drafter), "model") as work:
        target, tokenizer = load_target(None, dtype, device)
        for name in drafter:
            work.advance(note=name)
            proposers[name] = load_drafter(name, target, tokenizer)
    streamed = proposers[drafter[-1]]
    held_out = assets.held_out_prompts()[: prompts or None]
    console = PlainConsole()
    with user_errors():
        tokens = min(max_new_tokens, STREAMED_TOKENS)
        if stream:
            _stream(console, target, tokenizer, streamed, tokens)
        if picture is not None:
            recorded = PlainConsole(
                record=True,
                file=io.StringIO(),
                force_terminal=True,
                color_system="truecolor",
                width=90,
            )
            _stream(recorded, target, tokenizer, streamed, tokens)
            recorded.save_svg(str(picture), title="specdec demo", code_format=_SVG)
        console.print(machine_line(target), soft_wrap=True)
        warn_if_busy(console)
        encoded = [encode(tokenizer, each["prompt"], target.device) for each in held_out]
        results = _measure(target, proposers, encoded, max_new_tokens)
    title = f"medians over {len(held_out)} held-out prompts, {max_new_tokens} tokens each, greedy"
    compared = {
        name: series.compared_to(results[HF], target)
        for name, series in results.items()
        if name != HF
    }
    drafted = [results[OURS.format(name)] for name in proposers]
    console.blocks(
        _speed_table(results, compared, title),
        *(position_table(series) for series in drafted if series.total("drafts")),
    )
    console.print(repetition_note(results[HF]), soft_wrap=True)
    if not _print_differences(console, compared, held_out, encoded):
        raise typer.Exit(1)


def _stream(
    console: PlainConsole,
    target: Model,
    tokenizer: PreTrainedTokenizerBase,
    proposer: Any,
    max_new_tokens: int,
) -> None:
    import specdec_ext
    from specdec_ext import assets

    (prompt,) = (each for each in assets.held_out_prompts() if each["name"] == STREAMED)
    console.sentence(
        f"The model continues {STREAMED}, a file that it was not trained on (sampled at temperature "
        f"{SAMPLED['temperature']}, seed {SAMPLED['seed']}; the text is the same with every drafter)",
        style="bold",
    )
    console.print(legend(console))
    console.print()
    shown = prompt["prompt"].splitlines(keepends=True)[-SHOWN_PROMPT_LINES:]
    console.print("...\n" + "".join(shown), style="dim", end="", soft_wrap=True)
    specdec_ext.generate(
        target,
        encode(tokenizer, prompt["prompt"], target.device),
        drafter=proposer,
        streamer=TextStreamer(console, tokenizer, mark_drafted=True),
        max_new_tokens=max_new_tokens,
        speculation="fixed",  # "auto" depends on measured times and would mark other tokens in each run
        **SAMPLED,
    )
    console.print("\n")


def _measure(
    target: Model, proposers: dict[str, Any], encoded: list[LongTensor], max_new_tokens: int
) -> dict[str, Series]:
    from specdec_ext.evaluate.benchmark import generation_kwargs, hugging_face, interleave, ours

    shared = generation_kwargs(max_new_tokens)
    contestants = {
        HF: hugging_face(target, shared),
        HF_LOOKUP: hugging_face(target, shared, prompt_lookup_num_tokens=10),
    }
    for name, proposer in {"none": None, **proposers}.items():
        contestants[OURS.format(name)] = ours(target, proposer, shared)
    prompts = [{"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)} for ids in encoded]
    return interleave(contestants, prompts)


def _speed_table(
    results: dict[str, Series], compared: dict[str, list[ComparedRuns]], title: str
) -> Table:
    from specdec_ext.evaluate.benchmark import same_text

    rows = []
    for name, series in results.items():
        length = series.mean_acceptance_length
        rows.append(
            (
                name,
                f"{series.median_tokens_per_second:.1f}",
                f"{series.speedup(results[HF]).value:.2f}x",
                "" if length is None else f"{length:.2f}",
                same_text(compared[name]) if name in compared else "",
            )
        )
    return Table(rows, ("", "tokens/s", "ratio", "acceptance length", "same text"), title)


def _print_differences(
    console: PlainConsole,
    compared: dict[str, list[ComparedRuns]],
    prompts: list[dict[str, str]],
    encoded: list[LongTensor],
) -> bool:
    """Print every difference from HF generate; return False if one of them is a bug of specdec_ext."""
    sound = True
    for name, verdicts in compared.items():
        for each, prompt, ids in zip(verdicts, prompts, encoded, strict=True):
            if not each.equal:
                console.print(
                    f"{name}, {prompt['name']}: {describe(each, ids.shape[1])}", soft_wrap=True
                )
                sound = sound and (each.verdict != "bug" or name == HF_LOOKUP)
    return sound
