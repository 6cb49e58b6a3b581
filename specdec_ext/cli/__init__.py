"""The command line ``specdec``: one module per command, each a thin layer over public functions.

torch, transformers and the rest of the package are imported inside the commands, so that ``specdec --help``
starts quickly.
"""

from __future__ import annotations

from typing import Annotated

import typer

from specdec_ext.cli.bench import bench
from specdec_ext.cli.check import check
from specdec_ext.cli.demo import demo
from specdec_ext.cli.generate import generate
from specdec_ext.cli.inspect import inspect
from specdec_ext.cli.keywords import keywords
from specdec_ext.cli.train import train
from specdec_ext.cli.version import print_versions, version

__all__ = ["app"]

app = typer.Typer(
    name="specdec",
    help="Speculative decoding that emits exactly what the model alone would have emitted.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _print_versions_and_exit(wanted: bool) -> None:
    if wanted:
        print_versions()
        raise typer.Exit


@app.callback()
def specdec(
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


specdec.__doc__ = None  # the help text is the app's
for command in (demo, generate, bench, check, inspect, keywords, train, version):
    app.command()(command)
