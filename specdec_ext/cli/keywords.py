"""``specdec keywords``: how every keyword of transformers' ``generate`` is treated."""

from __future__ import annotations

from typing import Annotated

import typer

from specdec_ext.cli.shared.common import user_errors
from specdec_ext.display import Table
from specdec_ext.display.console import PlainConsole
from specdec_ext.display.text import did_you_mean
from specdec_ext.keyword_table import TABLES
from specdec_ext.keyword_table import markdown as as_markdown


def keywords(
    part: Annotated[
        str, typer.Argument(help="Show only keywords whose name contains this text.")
    ] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the whole table as Markdown.")
    ] = False,
) -> None:
    """Show which keywords of transformers' generate are exact, exact but slower, or refused, and why."""
    if markdown:
        typer.echo(as_markdown())
        return
    found = {
        title: {name: keyword for name, keyword in keywords.items() if part in name}
        for title, keywords in TABLES.items()
    }
    if not any(found.values()):
        known = [name for keywords in TABLES.values() for name in keywords]
        with user_errors():
            raise ValueError(
                f"PART {part!r}: no keyword of generate contains that in its name"
                + (did_you_mean(part, known) or "; leave it out to see all")
            )
    console = PlainConsole()
    for title, keywords in found.items():
        if keywords:
            rows = [
                (name, keyword.verdict.value, keyword.note) for name, keyword in keywords.items()
            ]
            console.print(Table(rows, (title, "verdict", "")))
