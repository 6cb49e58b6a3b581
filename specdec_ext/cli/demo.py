"""``specdec demo``: see speculation at work on the bundled models, then measure it against Hugging Face.

Numbers are of one run: every contestant continues every prompt in turn with the same keywords, after a
warm-up of each; medians over prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from specdec_ext.cli._common import (
    DeviceOption,
    Dtype,
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
from specdec_ext.cli._console import PlainConsole
from specdec_ext.cli._stream import TextStreamer, legend

if TYPE_CHECKING:
    from torch import LongTensor
    from transformers import PreTrainedTokenizerBase

    from specdec_ext import ComparedRuns
    from specdec_ext.benchmark import Series

HF = "HF generate"
HF_LOOKUP = "HF prompt lookup (10)"
OURS = "specdec, drafter={}"
# n-gram copies, the bundled head, and what the two do together.
DRAFTERS = ["ngram", "head", "auto"]
SHOWN_PROMPT_LINES = 6


def demo(
    prompts: Annotated[
        int, typer.Option(min=0, help="Number of bundled prompts to measure; 0 for all of them.")
    ] = 10,
    max_new_tokens: MaxNewTokensOption = 128,
    drafter: Annotated[
        list[str],
        typer.Option(
            "--drafter", help="As of generate; may be repeated. The last one is streamed."
        ),
    ] = DRAFTERS,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "auto",
    stream: Annotated[bool, typer.Option(help="Show a completion before measuring.")] = True,
) -> None:
    """Stream a completion of real code with accepted drafts marked, then measure against HF generate."""
    from specdec_ext import assets
    from specdec_ext.benchmark import machine_line, position_table

    target, tokenizer = load_target(None, dtype, device)
    proposers = {name: load_drafter(name, target, tokenizer) for name in drafter}
    streamed = proposers[drafter[-1]]
    held_out = assets.held_out_prompts()[: prompts or None]
    console = PlainConsole()
    with user_errors():
        if stream:
            _stream(console, target, tokenizer, streamed, held_out[0], max_new_tokens)
        console.print(machine_line(target), soft_wrap=True)
        warn_if_busy(console)
        encoded = [encode(tokenizer, each["prompt"], target.device) for each in held_out]
        results = _measure(console, target, proposers, encoded, max_new_tokens)
    title = f"medians over {len(held_out)} held-out prompts, {max_new_tokens} tokens each, greedy"
    compared = {
        name: series.compared_to(results[HF], target)
        for name, series in results.items()
        if name != HF
    }
    console.print(_speed_table(results, compared, title))
    for name in proposers:
        if results[OURS.format(name)].total("drafts"):
            console.print(position_table(results[OURS.format(name)]))
    console.print(
        f"unique 4-grams in the completions: {results[HF].unique_4grams:.0%} "
        "(text that repeats itself is easy to guess and inflates ratios)",
        soft_wrap=True,
    )
    if not _print_differences(console, compared, held_out, encoded):
        raise typer.Exit(1)


def _stream(
    console: PlainConsole,
    target: Model,
    tokenizer: PreTrainedTokenizerBase,
    proposer: Any,
    prompt: dict[str, str],
    max_new_tokens: int,
) -> None:
    import specdec_ext

    console.print(f"{prompt['name']}, a file the model never saw, continued by it", style="bold")
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
        do_sample=False,
    )
    console.print("\n")


def _measure(
    console: PlainConsole,
    target: Model,
    proposers: dict[str, Any],
    encoded: list[LongTensor],
    max_new_tokens: int,
) -> dict[str, Series]:
    from specdec_ext.benchmark import hugging_face, interleave, law, ours

    shared = law(max_new_tokens)
    contestants = {
        HF: hugging_face(target, shared),
        HF_LOOKUP: hugging_face(target, shared, prompt_lookup_num_tokens=10),
    }
    for name, proposer in {"none": None, **proposers}.items():
        contestants[OURS.format(name)] = ours(target, proposer, shared)
    prompts = [{"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)} for ids in encoded]
    with console.status("warming up") as status:

        def progress(contestant: str, done: int, total: int) -> None:
            status.update(f"measuring {done}/{total}: {contestant}")

        return interleave(contestants, prompts, on_call=progress)


def _speed_table(
    results: dict[str, Series], compared: dict[str, list[ComparedRuns]], title: str
) -> Table:
    from specdec_ext.benchmark import same_text

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("tokens/s", "ratio", "acceptance length", "same text"):
        table.add_column(heading, justify="right")
    for name, series in results.items():
        length = series.mean_acceptance_length
        table.add_row(
            name,
            f"{series.median_tokens_per_second:.1f}",
            f"{series.speedup(results[HF]).value:.2f}x",
            "" if length is None else f"{length:.2f}",
            same_text(compared[name]) if name in compared else "",
        )
    return table


def _print_differences(
    console: PlainConsole,
    compared: dict[str, list[ComparedRuns]],
    prompts: list[dict[str, str]],
    encoded: list[LongTensor],
) -> bool:
    """Name every difference from HF generate; whether none of them is a bug of specdec_ext."""
    sound = True
    for name, verdicts in compared.items():
        for each, prompt, ids in zip(verdicts, prompts, encoded, strict=True):
            if not each.equal:
                console.print(
                    f"{name}, {prompt['name']}: {describe(each, ids.shape[1])}", soft_wrap=True
                )
                sound = sound and (each.verdict != "bug" or name == HF_LOOKUP)
    return sound
