"""Display of results: one line as text, a small table in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

MAX_LINE = 200  # characters


class Summarised:
    """Base class of results with many fields: ``repr`` and ``str`` are one line.

    Subclasses that are dataclasses need ``repr=False``. The text may come from a checkpoint or a prompt, so
    it is escaped in the HTML for notebooks.
    """

    def summary(self) -> str:
        """The result in one line."""
        raise NotImplementedError

    def details(self) -> Iterable[tuple[str, ...]]:
        """Rows of the table shown in a notebook; the first cell is the name of the row."""
        return ()

    def __repr__(self) -> str:
        line = " ".join(self.summary().split())
        if len(line) > MAX_LINE:
            line = f"{line[: MAX_LINE - 4]} ..."
        return f"{type(self).__name__}({line})"

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.details()
        )
        return f"<p>{escape(repr(self))}</p><table>{rows}</table>"
