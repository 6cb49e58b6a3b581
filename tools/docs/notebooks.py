"""Turn a notebook into a Markdown page: its text, its code, and the output that is saved in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def page(notebook: Mapping[str, Any], name: str) -> str:
    """Return the page of a notebook.

    Args:
        notebook: the content of the ``.ipynb`` file (nbformat 4).
        name: the file's name, which the page links to; the file is beside the page on the site.
    """
    download = f'<a href="../{name}" download>Download this notebook</a>'
    parts = [part for cell in notebook["cells"] for part in _cell(cell)]
    return "\n\n".join([*parts, download]) + "\n"


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        yield _output(output)


def _output(output: Mapping[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _text(output["text"])
    data = output["data"]
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})"
    if "text/html" in data:
        return f"<div>{''.join(data['text/html'])}</div>"
    return _text(data["text/plain"])


def _text(lines: list[str] | str) -> str:
    return f'```text title="output"\n{"".join(lines).rstrip()}\n```'
