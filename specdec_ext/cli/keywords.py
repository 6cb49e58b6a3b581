"""``specdec keywords``: what becomes of every keyword of transformers' ``generate``."""

from __future__ import annotations

from typing import Annotated

import typer


def keywords(
    part: Annotated[str, typer.Argument(help="Only names that contain this.")] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The whole table for a page.")
    ] = False,
) -> None:
    """Show which keywords of transformers' generate are exact, exact on a slower path, or refused and why."""
    from rich.console import Console
    from rich.table import Table

    from specdec_ext.keywords import TABLES
    from specdec_ext.keywords import markdown as as_markdown

    if markdown:
        typer.echo(as_markdown())
        return
    console = Console()
    for title, keywords in TABLES.items():
        found = {name: keyword for name, keyword in keywords.items() if part in name}
        if found:
            table = Table(title, "verdict", "", box=None, title_justify="left")
            for name, keyword in found.items():
                table.add_row(name, keyword.verdict.value, keyword.note)
            console.print(table)
