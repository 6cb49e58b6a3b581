"""``specdec serve``: an HTTP server with OpenAI's API."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Literal

import typer

from specdec_ext.cli.shared.common import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
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
from specdec_ext.cli.shared.lock import LockOption, check_lock, read_lock
from specdec_ext.cli.shared.ranks import (
    check_ranks,
    end_ranks,
    is_rank,
    make_parallel_engine,
    rank,
    start_ranks,
)
from specdec_ext.defaults import MAX_BODY_BYTES, MAX_ROWS, PREFIX_TOKENS

# How long the thread that decodes waits for the one that answers, when both run Python; by default 0.005.
SWITCH_SECONDS = 0.0005


def serve(
    model: ServedArgument,
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
    served_model_name: ServedModelNameOption = None,
    chat_template: ChatTemplateOption = None,
    max_rows: MaxRowsOption = MAX_ROWS,
    max_tokens: MaxTokensOption = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Most requests that wait; further ones get status 429.")
    ] = 256,
    prefix_tokens: PrefixTokensOption = PREFIX_TOKENS,
    max_length: MaxLengthOption = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Largest body of a request.")
    ] = MAX_BODY_BYTES,
    request_timeout: Annotated[
        float, typer.Option(min=0.001, help="Most seconds for a request, waiting included.")
    ] = 600.0,
    tp: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of processes (and GPUs) over which the layers of the model are spread.",
        ),
    ] = 1,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Form of the log on standard error.")
    ] = "text",
    lock: LockOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Serve a model with OpenAI's API: chat completions, completions, models, metrics.

    SIGTERM or Ctrl-C stops accepting requests and finishes those that were accepted; a second one ends at
    once. With --tp, torchrun starts the processes, and the first of them listens.
    """
    require_server_packages("specdec serve")
    if tp > 1:
        if device != "auto":
            raise typer.BadParameter("--device has no effect with --tp; each process takes its own")
        with user_errors():
            check_ranks(tp)
        if not is_rank():
            start_ranks(tp, sys.argv[1:])
    from specdec_ext import PairLock
    from specdec_ext.engine import make_engine
    from specdec_ext.serve.logs import configure
    from specdec_ext.serve.server import bound
    from specdec_ext.serve.server import serve as serve_engine
    from specdec_ext.serve.service import Settings

    sys.setswitchinterval(SWITCH_SECONDS)
    with user_errors("--host, --port"):
        place = bound(host, port) if tp == 1 or rank() == 0 else None
    template = read_template(chat_template)
    locked = read_lock(lock)
    target, tokenizer = load_target(model, dtype, device, is_parallel=tp > 1)
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
        engine = (make_engine if tp == 1 else make_parallel_engine)(
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
    if place is not None:
        serve_engine(engine, settings, place)
    if tp > 1:
        end_ranks(engine)
