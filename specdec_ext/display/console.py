"""The console of all commands: text from checkpoints, prompts and models is printed as plain text.

Prompts and names in a checkpoint are untrusted. rich would interpret ``[red]`` in them as markup and pass on
escape sequences, with which a file could overwrite the verdict about itself.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

_KEPT = "\n\t"
# Control characters, halves of surrogate pairs, line separators.
_HIDDEN = {"Cc", "Cs", "Zl", "Zp"}
# Bidirectional controls: they change the order in which the following characters are shown.
_REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def printable(text: str) -> str:
    r"""Return ``text`` with the characters that control a terminal written as escapes, such as ``\x1b``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii") if _is_control(character) else character
        for character in text
    )


def _is_control(character: str) -> bool:
    return character not in _KEPT and (
        unicodedata.category(character) in _HIDDEN
        or unicodedata.bidirectional(character) in _REORDERING
    )


class PlainConsole(Console):
    """A console that prints strings without markup, emoji codes and control characters.

    Styled output is a ``rich.text.Text`` or uses the argument ``style``.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:  # also of the cells of tables
        return super().render_str(printable(text), **options)

    def status(self, status: Any, **options: Any) -> Status:
        return _PlainStatus(status, console=self, **options)

    def sentence(self, text: str, style: str | None = None) -> None:
        """Print a line of prose: wrapped at words on a terminal, unwrapped in a pipe."""
        self.print(text, style=style, soft_wrap=not self.is_terminal)


class _PlainStatus(Status):
    """A spinner with plain text; rich's ``Status`` would interpret markup despite the console's setting."""

    def __init__(self, status: Any, **options: Any):
        super().__init__(_text(status), **options)

    def update(self, status: Any = None, **options: Any) -> None:
        super().update(_text(status), **options)


def _text(given: Any) -> Any:
    return Text(printable(given)) if isinstance(given, str) else given
