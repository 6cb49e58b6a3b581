"""Options of the commands that answer requests with an engine, and the packages that these need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec_ext.cli.shared.common import user_errors
from specdec_ext.preflight.extras import require

ServedArgument = Annotated[
    str,
    typer.Argument(
        help="Folder or hub id of a causal language model; 'bundled' for the bundled model."
    ),
]
ServedModelNameOption = Annotated[
    str | None,
    typer.Option(help="Name under which requests ask for the model; default: MODEL."),
]
ChatTemplateOption = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="File with a Jinja chat template; default: that of the tokenizer.",
    ),
]
MaxRowsOption = Annotated[int, typer.Option(min=1, help="Most requests that are decoded together.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens, prompts included, of all running requests."),
]
MaxLengthOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Most tokens of a text, prompt included; default: as many as the model has positions, or "
        "8192 if it names none.",
    ),
]
PrefixTokensOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Most tokens of prompts that are kept for prompts that begin with the same tokens.",
    ),
]


def require_server_packages(command: str) -> None:
    """Refuse a command whose packages are missing; the message has the command that installs them."""
    with user_errors():
        for package in ("fastapi", "uvicorn", "openai", "httpx2", "prometheus_client"):
            require(package, command)


def read_template(path: Path | None) -> str | None:
    """The text of ``--chat-template``."""
    if path is None:
        return None
    with user_errors("--chat-template"):
        return path.read_text("utf-8")
