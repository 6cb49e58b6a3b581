"""``Summarised``: the base class of everything that a call returns for people to read."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from specdec_ext.display.table import Table
from specdec_ext.display.text import one_line

MAX_LINE = 200  # characters


class Summarised:
    """Base class of results: ``str`` is one line, notebooks show a table, :meth:`explain` is prose.

    Subclasses that are dataclasses keep their own ``repr`` unless they are declared with ``repr=False``. The
    text may come from a checkpoint or a prompt, so control characters are spelled out and HTML is escaped.
    """

    def summary(self) -> str:
        """The result in one line."""
        raise NotImplementedError

    def sentences(self) -> Iterable[str]:
        """The paragraphs of :meth:`explain`: what the result is, why, and what to do about it."""
        yield self.summary()

    def tables(self) -> Iterable[Table]:
        """The tables shown in a notebook and below the text of :meth:`explain`."""
        return ()

    def explain(self) -> str:
        """Explain the result in sentences and tables of at most 80 columns."""
        from specdec_ext.display.console import plain_text

        return plain_text(*self.sentences(), *self.tables())

    def __str__(self) -> str:
        line = one_line(self.summary())
        return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 4]} ..."

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>" + "".join(table.html() for table in self.tables())
