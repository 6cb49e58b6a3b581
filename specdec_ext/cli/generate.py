"""``specdec generate``: complete a prompt and stream the text to standard output."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from specdec_ext.cli.shared.common import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    MaxNewTokensOption,
    ModelArgument,
    SpeculationOption,
    encode,
    load_drafter,
    load_target,
    user_errors,
)
from specdec_ext.cli.shared.lock import LockOption, check_lock, read_lock
from specdec_ext.cli.shared.sampling import (
    SampleOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    sampling_kwargs,
)
from specdec_ext.cli.shared.stream import TextStreamer
from specdec_ext.display.console import PlainConsole


def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Text to continue; default: standard input."),
    ] = None,
    drafter: DrafterOption = "auto",
    speculation: SpeculationOption = "auto",
    max_new_tokens: MaxNewTokensOption = 128,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark accepted draft tokens in the text.")
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Print speed, acceptance and the reasons for drafting to standard error.",
        ),
    ] = False,
    lock: LockOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Complete a prompt; the text does not depend on the drafter."""
    import specdec_ext

    sampling = sampling_kwargs(sample, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    text, locked = _prompt(prompt), read_lock(lock)
    target, tokenizer = load_target(model, dtype, device)
    proposer = load_drafter(drafter, target, tokenizer)
    check_lock(locked, target, proposer, speculation)
    console = PlainConsole()
    with user_errors():
        input_ids = encode(tokenizer, text, target.device)
        began = time.perf_counter()
        output: Any = specdec_ext.generate(
            target,
            input_ids,
            drafter=proposer,
            speculation=speculation,
            streamer=TextStreamer(console, tokenizer, mark_drafted=show_drafts),
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            **sampling,
        )
    seconds = time.perf_counter() - began
    console.print()
    if stats:
        count = output.sequences.shape[1] - input_ids.shape[1]
        counted = output.speculation_stats
        typer.echo(
            f"{count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s), "
            f"{counted.steps} steps, mean acceptance length {counted.mean_acceptance_length:.2f}, "
            f"{counted.accepted_tokens} of {counted.draft_tokens} draft tokens accepted\n\n"
            f"{counted.explain()}",
            err=True,
        )


def _prompt(prompt: str | None) -> str:
    if prompt is None:
        if sys.stdin.isatty():
            raise typer.BadParameter("pass a prompt with --prompt, or pipe one into standard input")
        with user_errors():
            prompt = sys.stdin.read()
    if not prompt:
        raise typer.BadParameter("the prompt is empty; there is nothing to continue")
    return prompt
