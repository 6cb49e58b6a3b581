"""``Table``: rows of text for a console, for plain text and for notebooks."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from specdec_ext.display.text import as_markdown, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUMBER = re.compile(r"[-+<]?\d")
_LONGEST_NUMBER = 32  # characters, unit included


@dataclass(frozen=True)
class Table:
    """A table that is printed in full: text wraps where the console is narrow, numbers stay whole.

    Columns of numbers are aligned to the right. ``rich`` prints the table on any console, and
    :func:`~specdec_ext.display.console.plain_text` makes text of it; files have it as Markdown or HTML.

    Attributes:
        rows: the cells of each row.
        headings: names of the columns; () for a table of names and values.
        title: stands above the table.
        marked: numbers of the rows that are shown in bold.
    """

    rows: Sequence[Sequence[str]]
    headings: Sequence[str] = ()
    title: str = ""
    marked: Collection[int] = ()

    def _numeric(self) -> list[bool]:
        """For each column, whether its cells are numbers or empty."""
        columns = [[cell for cell in column if cell] for column in zip(*self.rows, strict=True)]
        columns = columns or [[] for _ in self.headings]
        return [
            bool(cells)
            and all(_NUMBER.match(cell) and len(cell) <= _LONGEST_NUMBER for cell in cells)
            for cells in columns
        ]

    def __rich__(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        def plain(text: str) -> Text:
            return Text(printable(text), overflow="fold")

        table = RichTable(
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
            show_header=bool(self.headings),
        )
        for column, numeric in enumerate(self._numeric()):
            heading = plain(self.headings[column]) if self.headings else ""
            table.add_column(
                heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold"
            )
        for number, row in enumerate(self.rows):
            table.add_row(*map(plain, row), style="bold" if number in self.marked else None)
        return Group(plain(self.title), table) if self.title else table

    def markdown(self) -> str:
        """The table in Markdown, with its title above; text is escaped, so that it is shown as it is."""
        numeric = self._numeric()

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(map(as_markdown, cells)) + " |"

        head = line(self.headings or [""] * len(numeric))
        rule = "|" + "|".join("---:" if right else "---" for right in numeric) + "|"
        title = [f"{as_markdown(self.title)}\n"] if self.title else []
        return "\n".join([*title, head, rule, *map(line, self.rows)])

    def html(self) -> str:
        """The table as HTML, without colours, so that it suits light and dark notebooks."""
        numeric = self._numeric()

        def line(tag: str, cells: Sequence[str], style: str = "") -> str:
            aligned = (
                f'<{tag} style="text-align:{"right" if right else "left"}">'
                f"{escape(printable(cell))}</{tag}>"
                for cell, right in zip(cells, numeric, strict=True)
            )
            return f"<tr{style}>{''.join(aligned)}</tr>"

        bold = ' style="font-weight:bold"'
        title = f'<caption style="text-align:left">{escape(printable(self.title))}</caption>'
        head = f"<thead>{line('th', self.headings)}</thead>" if self.headings else ""
        body = "".join(
            line("td", row, bold if number in self.marked else "")
            for number, row in enumerate(self.rows)
        )
        return f"<table>{title if self.title else ''}{head}<tbody>{body}</tbody></table>"
