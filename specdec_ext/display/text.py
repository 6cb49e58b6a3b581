"""Text that is safe to print: names in checkpoints, prompts and models are untrusted."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches

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


def one_line(text: str) -> str:
    """Return ``text`` on one line, without control characters."""
    return " ".join(printable(text).split())


def as_markdown(text: str) -> str:
    """Return ``text`` on one line of Markdown that shows it as it is: markup and HTML are escaped."""
    return re.sub(r"([\\`*_\[\]|<>&#])", r"\\\1", one_line(text))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``"1 row"`` or ``"2 rows"``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause with the known name that an unknown one resembles, for its error; "" if none does."""
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def byte_size(count: int) -> str:
    """Return a number of bytes with a binary unit, such as ``"676.0 KiB"``."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while value >= 1024 and (larger := next(units, None)) is not None:
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def _is_control(character: str) -> bool:
    return character not in _KEPT and (
        unicodedata.category(character) in _HIDDEN
        or unicodedata.bidirectional(character) in _REORDERING
    )
