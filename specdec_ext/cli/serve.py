"""``specdec serve``: an HTTP server with OpenAI's API."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec_ext.cli.shared.common import (
    BUNDLED,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    SpeculationOption,
    load_drafter,
    load_target,
    user_errors,
)
from specdec_ext.cli.shared.lock import LockOption, check_lock, read_lock
from specdec_ext.preflight.extras import require


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder or hub id of a causal language model; 'bundled' for the bundled model."
        ),
    ],
    drafter: DrafterOption = "auto",
    speculation: SpeculationOption = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SPECDEC_API_KEY",
            show_envvar=True,
            help="Refuse requests without this key, except for /, /health and /metrics.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name under which clients ask for the model; default: MODEL.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File with a Jinja chat template; default: that of the tokenizer.",
        ),
    ] = None,
    max_rows: Annotated[
        int, typer.Option(min=1, help="Most requests that are decoded together.")
    ] = 16,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens, prompts included, of all running requests."),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Most requests that wait; further ones get status 429.")
    ] = 256,
    prefix_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Most tokens of prompts that are kept for prompts that begin with the same tokens.",
        ),
    ] = 8192,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Most tokens of a text, prompt included; default: as many as the model has positions, or "
            "8192 if it names none.",
        ),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 4
    * 2**20,
    request_timeout: Annotated[
        float, typer.Option(min=0.001, help="Most seconds for a request, waiting included.")
    ] = 600.0,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Form of the log on standard error.")
    ] = "text",
    lock: LockOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Serve a model with OpenAI's API: chat completions, completions, models, metrics.

    SIGTERM or Ctrl-C stops accepting requests and finishes those that were accepted; a second one ends at
    once.
    """
    with user_errors():
        for package in ("fastapi", "uvicorn", "openai", "prometheus_client"):
            require(package, "specdec serve")
    from specdec_ext import PairLock
    from specdec_ext.engine import make_engine
    from specdec_ext.serve.logs import configure
    from specdec_ext.serve.server import bound
    from specdec_ext.serve.server import serve as serve_engine
    from specdec_ext.serve.service import Settings

    with user_errors("--host, --port"):
        place = bound(host, port)
    template = None
    if chat_template is not None:
        with user_errors("--chat-template"):
            template = chat_template.read_text("utf-8")
    locked = read_lock(lock)
    target, tokenizer = load_target(None if model == BUNDLED else model, dtype, device)
    proposer = load_drafter(drafter, target, tokenizer)
    check_lock(locked, target, proposer, speculation)
    settings = Settings(
        model_name=served_model_name or model,
        chat_template=template,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        request_timeout=request_timeout,
        pair=partial(PairLock.of, target, proposer, speculation=speculation),
        reference=None if locked is None else locked.reference,
    )
    configure(log_format)
    with user_errors():
        engine = make_engine(
            target,
            drafter=proposer,
            speculation=speculation,
            tokenizer=tokenizer,
            max_rows=max_rows,
            max_length=max_length,
            max_tokens=max_tokens,
            max_waiting=max_waiting,
            prefix_tokens=prefix_tokens,
        )
    serve_engine(engine, settings, place)
