"""What the commands print with: text of checkpoints, prompts and models is shown as it is, and never obeyed.

Names in a checkpoint and prompts are anybody's text. rich would take ``[red]`` in them for markup and hand on
escape sequences, with which a file can repaint the verdict about itself.
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
# Characters that show what follows them in another order.
_REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def printable(text: str) -> str:
    r"""``text`` with characters that steer a terminal spelled out, such as ``\x1b``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii") if _steers(character) else character
        for character in text
    )


def _steers(character: str) -> bool:
    return character not in _KEPT and (
        unicodedata.category(character) in _HIDDEN
        or unicodedata.bidirectional(character) in _REORDERING
    )


class PlainConsole(Console):
    """A console on which strings are text: no markup, no emoji codes, no control characters.

    What is to have a style is a ``rich.text.Text``, or has the argument ``style``. Long lines break at words,
    and in a pipe nowhere.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:  # also of the cells of tables
        return super().render_str(printable(text), **options)

    def status(self, status: Any, **options: Any) -> Status:
        return _PlainStatus(status, console=self, **options)

    def sentence(self, text: str, style: str | None = None) -> None:
        """A line of prose: broken at words by a terminal, left alone in a pipe."""
        self.print(text, style=style, soft_wrap=not self.is_terminal)


class _PlainStatus(Status):
    """A spinner takes strings for markup whatever the console says."""

    def __init__(self, status: Any, **options: Any):
        super().__init__(_text(status), **options)

    def update(self, status: Any = None, **options: Any) -> None:
        super().update(_text(status), **options)


def _text(given: Any) -> Any:
    return Text(printable(given)) if isinstance(given, str) else given
