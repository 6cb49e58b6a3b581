"""``StopStrings``: ends a text before the first stop string, of which a reader sees no part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a text that arrives in pieces.

    The text ends where the first stop string is complete. If several are complete with the same character,
    the longest counts. So the result does not depend on how the text is divided into pieces.

    Args:
        strings: the stop strings, none of them empty.

    Attributes:
        found: the stop string that ended the text; None before that.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = list(strings)
        self._held = ""  # may be the beginning of a stop string
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """Add a piece and return the text that is certain to stand before any stop string."""
        if self.found is not None:
            return ""
        text = self._held + piece
        matches = [
            (start + len(each), start, each)
            for each in self._strings
            if (start := text.find(each)) >= 0
        ]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        held = max((_overlap(text, each) for each in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the text held back, after the last piece."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of ``text`` that is a proper beginning of ``string``."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
