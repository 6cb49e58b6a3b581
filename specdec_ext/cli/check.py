"""``specdec check``: test whether speculation is lossless for a model, a drafter and this machine.

First the claims of ``supports(model)`` are tested logit by logit, then whole texts are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_ext.cli.shared.common import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    MaxNewTokensOption,
    ModelArgument,
    PromptsOption,
    describe,
    encode,
    load_drafter,
    load_target,
    read_prompts,
    user_errors,
)
from specdec_ext.display import Table
from specdec_ext.display.console import PlainConsole
from specdec_ext.display.progress import tracked


def check(
    model: ModelArgument = None,
    drafter: DrafterOption = "auto",
    prompts: PromptsOption = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="A single prompt, instead of --prompts.")
    ] = None,
    max_new_tokens: MaxNewTokensOption = 64,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Test that speculation is lossless for a model on this machine; exit code 1 if it is not.

    First the model's logits: passes over several tokens, rejected drafts, trees and ragged batches must give
    the logits of Hugging Face generate. Then greedy texts: Hugging Face generate, plain and speculative
    decoding must emit the same tokens. Where two texts first differ, the difference is a near-tie (rounding
    in half precision) if the logits of the two tokens differ by at most twice the rounding error measured at
    that position, and a bug otherwise.
    """
    import specdec_ext

    with user_errors():
        texts = _texts(prompts, prompt)
    target, tokenizer = load_target(model, dtype, device)
    proposer = load_drafter(drafter, target, tokenizer)
    console = PlainConsole()
    with user_errors():
        found = specdec_ext.check_model(target, encode(tokenizer, texts[0][1], target.device))
    console.blocks(*found.support.tables(), *found.tables())
    if not found.holds:
        console.blocks(*found.sentences())
    rows: list[tuple[str, ...]] = []
    verdicts: list[str] = []
    greedy: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    with user_errors(), tracked("checking the texts", len(texts), "prompt") as work:
        for name, text in texts:
            input_ids = encode(tokenizer, text, target.device)
            reference = target.generate(input_ids, **greedy)[0]
            plain = specdec_ext.generate(target, input_ids, drafter=None, **greedy)[0]
            drafted = specdec_ext.generate(
                target, input_ids, drafter=proposer, speculation="fixed", **greedy
            )[0]
            length = input_ids.shape[1]
            compared = [
                specdec_ext.compare_runs(target, reference, plain, length),
                specdec_ext.compare_runs(target, plain, drafted, length),
            ]
            verdicts += [each.verdict for each in compared]
            rows.append((name, *(describe(each, length) for each in compared)))
            work.advance(note=name)
    console.blocks(Table(rows, ("prompt", "none vs HF generate", f"{drafter} vs none")))
    equal, ties, bugs = (verdicts.count(verdict) for verdict in ("equal", "near-tie", "bug"))
    console.sentence(f"{len(texts)} prompts, {equal} pairs equal, {ties} near-ties, {bugs} bugs")
    if bugs or not found.holds:
        raise typer.Exit(1)


def _texts(prompts: Path | None, prompt: str | None) -> list[tuple[str, str]]:
    """(name, text) of the prompts that the options name, or of the bundled prompts."""
    if prompts is not None and prompt is not None:
        raise ValueError("--prompts and --prompt both name the texts; pass only one of them")
    if prompt is not None:
        return [("prompt", prompt)]
    if prompts is not None:
        return read_prompts(prompts)
    from specdec_ext import assets

    return [(each["name"], each["prompt"]) for each in assets.held_out_prompts()]
