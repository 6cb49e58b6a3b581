"""``specdec check``: is speculation lossless for this model, drafter and machine?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec_ext.cli._common import (
    DeviceOption,
    DrafterOption,
    Dtype,
    DtypeOption,
    MaxNewTokensOption,
    ModelArgument,
    describe,
    encode,
    load_drafter,
    load_target,
    read_prompts,
    user_errors,
)


def check(
    model: ModelArgument = None,
    drafter: DrafterOption = "ngram",
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSON list or JSONL of prompts, or one prompt as text; the bundled ones by default.",
        ),
    ] = None,
    max_new_tokens: MaxNewTokensOption = 64,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Compare greedy texts of Hugging Face generate, plain and speculative decoding; exit 1 on a bug.

    The first difference of two texts is a near-tie if the logits of the two tokens are closer than twice what
    the ways of computing that position differ by (half precision), and a bug otherwise.
    """
    import specdec_ext

    with user_errors():
        texts = read_prompts(prompts) if prompts else _bundled_prompts()
    target, tokenizer = load_target(model, dtype, device)
    proposer = load_drafter(drafter, dtype, device)
    console = Console(highlight=False)
    table = Table("prompt", "none vs HF generate", f"{drafter} vs none")
    table.columns[0].overflow = "fold"
    verdicts: list[str] = []
    for name, text in texts:
        input_ids = encode(tokenizer, text, device)
        law: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        with user_errors(), console.status(f"checking {name}"):
            reference = target.generate(input_ids, **law)[0]
            plain = specdec_ext.generate(target, input_ids, drafter=None, **law)[0]
            drafted = specdec_ext.generate(target, input_ids, drafter=proposer, **law)[0]
            length = input_ids.shape[1]
            compared = [
                specdec_ext.compare_runs(target, reference, plain, length),
                specdec_ext.compare_runs(target, plain, drafted, length),
            ]
        verdicts += [each.verdict for each in compared]
        table.add_row(name, *(describe(each, length) for each in compared))
    console.print(table)
    equal, ties, bugs = (verdicts.count(verdict) for verdict in ("equal", "near-tie", "bug"))
    console.print(f"{len(texts)} prompts, {equal} pairs equal, {ties} near-ties, {bugs} bugs")
    if bugs:
        raise typer.Exit(1)


def _bundled_prompts() -> list[tuple[str, str]]:
    from specdec_ext import assets

    return [(each["name"], each["prompt"]) for each in assets.held_out_prompts()]
