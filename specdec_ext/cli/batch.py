"""``specdec batch``: answer a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec_ext.cli.shared.common import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    MaxNewTokensOption,
    SpeculationOption,
    load_drafter,
    load_target,
    user_errors,
)
from specdec_ext.cli.shared.engine import (
    ChatTemplateOption,
    MaxLengthOption,
    MaxRowsOption,
    MaxTokensOption,
    PrefixTokensOption,
    ServedArgument,
    ServedModelNameOption,
    read_template,
    require_server_packages,
)
from specdec_ext.cli.shared.sampling import (
    SampleOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    sampling_kwargs,
)
from specdec_ext.defaults import MAX_BODY_BYTES, MAX_ROWS, PREFIX_TOKENS
from specdec_ext.display.console import PlainConsole
from specdec_ext.preflight.outputs import writable_file


def batch(
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            exists=True,
            dir_okay=False,
            help="JSONL file of prompts, or in OpenAI's batch format.",
        ),
    ],
    answers: Annotated[
        Path, typer.Argument(metavar="OUT", help="JSONL file for the answers, in the same order.")
    ],
    model: ServedArgument,
    drafter: DrafterOption = "auto",
    speculation: SpeculationOption = "auto",
    max_new_tokens: MaxNewTokensOption = 128,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of line 1; line N has SEED + N - 1. Needs --sample."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin again if OUT has answers already.")
    ] = False,
    retry_errors: Annotated[
        bool,
        typer.Option(
            "--retry-errors", help="Answer the lines again whose record in OUT has an error."
        ),
    ] = False,
    served_model_name: ServedModelNameOption = None,
    chat_template: ChatTemplateOption = None,
    max_rows: MaxRowsOption = MAX_ROWS,
    max_tokens: MaxTokensOption = None,
    prefix_tokens: PrefixTokensOption = PREFIX_TOKENS,
    max_length: MaxLengthOption = None,
    max_line_bytes: Annotated[
        int, typer.Option(min=1, help="Most bytes of a line of IN.")
    ] = MAX_BODY_BYTES,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Answer a file of requests, with continuous batching and speculative decoding.

    If OUT has answers already, the command goes on behind them. A line that can't be answered gets a record
    with an error, and the exit status is 1; --retry-errors tries such lines again. --max-new-tokens and
    options of sampling are for plain prompts.
    """
    sampling = sampling_kwargs(sample, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    require_server_packages("specdec batch")
    if overwrite and retry_errors:
        raise typer.BadParameter("--overwrite answers all lines again; leave out --retry-errors")
    with user_errors():
        writable_file(answers, "OUT")
    from specdec_ext.batch import BatchFiles
    from specdec_ext.engine import make_engine
    from specdec_ext.serve.service import Settings

    template = read_template(chat_template)
    first_seed = sampling.pop("seed", None)
    if not sampling.pop("do_sample"):
        sampling["temperature"] = 0.0
    with user_errors():
        files = BatchFiles(
            requests,
            answers,
            max_line_bytes,
            {"model": served_model_name or model, "max_tokens": max_new_tokens, **sampling},
            seed=first_seed,
            overwrite=overwrite,
            retry_errors=retry_errors,
        )
    with files:
        target, tokenizer = load_target(model, dtype, device)
        settings = Settings(
            model_name=served_model_name or model,
            chat_template=template,
            max_body_bytes=max_line_bytes,
        )
        with user_errors():
            engine = make_engine(
                target,
                drafter=load_drafter(drafter, target, tokenizer),
                speculation=speculation,
                tokenizer=tokenizer,
                max_rows=max_rows,
                max_length=max_length,
                max_tokens=max_tokens,
                prefix_tokens=prefix_tokens,
            )
            with engine:
                report = files.answer(engine, settings)
    PlainConsole().print(f"{answers}: {report}", soft_wrap=True)
    if report.failed:
        raise typer.Exit(1)
