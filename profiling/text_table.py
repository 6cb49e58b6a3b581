"""Tables in plain text, for scripts that must run where only torch is installed."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()
) -> str:
    """One line per row under the header; columns in ``left`` are left-aligned, all others right-aligned."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = []
    for row in table:
        cells = [
            text.ljust(width) if name in left else text.rjust(width)
            for name, text, width in zip(header, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def format_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])
