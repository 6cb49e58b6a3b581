"""Hooks of mkdocs: the pages of the command line and of the notebooks, and links that leave ``docs/``.

Pages link to files of the repository in the way that a code host shows them: result tables, pictures,
CONTRIBUTING.md. Every file that is linked becomes part of the site, under ``repository/``, and the links are
rewritten to point there.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from tools.docs import notebooks

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")
# A reference of Sphinx in a docstring, such as :func:`generate`, rendered as code.
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def links(path: str, text: str) -> list[str]:
    """Files that a Markdown file links to, without anchors: paths from the repository's root.

    Args:
        path: of the file, from the root.
        text: of the file.
    """
    folder = posixpath.dirname(path)
    found = _LINK.findall(_FENCED.sub("", text))
    return [posixpath.normpath(posixpath.join(folder, link)) for link in found]


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and every file that is linked, directly or by a linked file."""
    from mkdocs.structure.files import File

    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    pages = {"reference/cli.md": _command_line()}
    for file in files:
        if file.src_uri.endswith(".ipynb"):
            notebook = json.loads(file.content_string)
            pages[_place(f"docs/{file.src_uri}")] = notebooks.page(notebook, file.name + ".ipynb")
    for place, content in pages.items():
        files.append(File.generated(config, place, content=content))
    while waiting:
        path = waiting.pop()
        for linked in links(path, (ROOT / path).read_text("utf-8")):
            place = _place(linked)
            if files.get_file_from_path(place) is None and (ROOT / linked).is_file():
                files.append(File.generated(config, place, abs_src_path=str(ROOT / linked)))
                if linked.endswith(".md"):
                    waiting.append(linked)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links point to where the linked files are on the site."""
    place = page.file.src_uri
    path = place.removeprefix("repository/") if _is_outside(place) else f"docs/{place}"

    def moved(link: re.Match[str]) -> str:
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[0]))
        return posixpath.relpath(_place(linked), posixpath.dirname(place) or ".")

    return _LINK.sub(moved, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Show names in docstrings without the roles of Sphinx."""
    return _ROLE.sub(r"<code>\1</code>", html)


def _place(path: str) -> str:
    """Where a file of the repository is on the site; a notebook is a page there."""
    if not path.startswith("docs/"):
        return f"repository/{path}"
    return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))


def _is_outside(place: str) -> bool:
    return place.startswith("repository/")


def _command_line() -> str:
    """Every command with its options, from the help texts."""
    import typer
    from typer.cli import get_docs_for_click

    from specdec_ext.cli import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="specdec")
    page = get_docs_for_click(obj=command, ctx=context, name="specdec", title="Command line")
    # The list of commands has cut-off sentences; the sections below it have whole ones.
    return re.sub(r"\*\*Commands\*\*:.*?(?=^## )", "", page, flags=re.MULTILINE | re.DOTALL)
