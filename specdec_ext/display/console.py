"""The console of all commands: text from checkpoints, prompts and models is printed as plain text.

Prompts and names in a checkpoint are untrusted. rich would interpret ``[red]`` in them as markup and pass on
escape sequences, with which a file could overwrite the verdict about itself.
"""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_ext.display.text import printable

WIDTH = 80  # columns of text that is not printed on a terminal


class PlainConsole(Console):
    """A console that prints strings without markup, emoji codes and control characters.

    Styled output is a ``rich.text.Text`` or uses the argument ``style``.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, force_jupyter=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:  # also of the cells of tables
        return super().render_str(printable(text), **options)

    def blocks(self, *parts: Any) -> None:
        """Print tables and texts, each followed by an empty line."""
        for part in parts:
            self.print(part)
            self.print()

    def sentence(self, text: str, style: str | None = None) -> None:
        """Print a line of prose: wrapped at words on a terminal, unwrapped in a pipe."""
        self.print(text, style=style, soft_wrap=not self.is_terminal)


def plain_text(*parts: Any) -> str:
    """Return paragraphs and tables as text of at most 80 columns, with an empty line between them.

    Args:
        parts: strings, :class:`~specdec_ext.display.Table` and whatever else rich prints.
    """
    texts = []
    for part in parts:
        console = PlainConsole(file=io.StringIO(), width=WIDTH, color_system=None)
        console.print(part)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        texts.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(texts)
