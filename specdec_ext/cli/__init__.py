"""The command line ``specdec``: one module per command, each a thin layer over public functions.

torch, transformers and the rest of the package are imported inside the commands, so that ``specdec --help``
starts quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer

from specdec_ext.cli.batch import batch
from specdec_ext.cli.bench import bench
from specdec_ext.cli.breakeven import breakeven
from specdec_ext.cli.chat import chat
from specdec_ext.cli.check import check
from specdec_ext.cli.demo import demo
from specdec_ext.cli.export import custom_generate, head
from specdec_ext.cli.generate import generate
from specdec_ext.cli.inspect import inspect
from specdec_ext.cli.keywords import keywords
from specdec_ext.cli.plan import plan
from specdec_ext.cli.rollout import rollout
from specdec_ext.cli.serve import serve
from specdec_ext.cli.train import train
from specdec_ext.cli.version import version
from specdec_ext.cli.watch import watch
from specdec_ext.display import disable_progress, enable_progress

__all__ = ["app"]

app = typer.Typer(
    name="specdec",
    help="Speculative decoding that emits exactly what the model alone would have emitted.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _print_versions_and_exit(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def specdec(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions_and_exit,
            is_eager=True,
            help="Print versions and exit.",
        ),
    ] = False,
) -> None:
    """Options that stand before the command; none of them changes what a command does."""
    enable_progress()
    context.call_on_close(disable_progress)


def _help(command: Callable[..., Any]) -> str:
    """The docstring with one line per paragraph, so that the terminal wraps it to its own width."""
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


specdec.__doc__ = None  # the help text is the app's
COMMANDS = (
    demo,
    generate,
    chat,
    bench,
    breakeven,
    check,
    rollout,
    serve,
    watch,
    batch,
    inspect,
    plan,
    keywords,
    train,
    version,
)
for command in COMMANDS:
    app.command(help=_help(command))(command)

export = typer.Typer(no_args_is_help=True, help="Write files with which other programs speculate.")
export.command("custom-generate", help=_help(custom_generate))(custom_generate)
export.command("head", help=_help(head))(head)
app.add_typer(export, name="export")
