"""``page``: a report as one HTML page that needs no other file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from typing import Any

from specdec_ext.display.text import printable

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
td, th {{ padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884; }}
svg {{ max-width: 100%; height: auto; background: white; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(title: str, parts: Sequence[str]) -> str:
    """The HTML of a page.

    Args:
        title: its heading, any text.
        parts: HTML of its parts.
    """
    return _PAGE.format(title=escape(printable(title)), body="\n".join(parts))


def paragraph(text: str) -> str:
    """The HTML of a paragraph of any text."""
    return f"<p>{escape(printable(text))}</p>"


def svg(figure: Any) -> str:
    """A matplotlib figure as an SVG element."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    text = drawn.getvalue()
    return text[text.index("<svg") :]
