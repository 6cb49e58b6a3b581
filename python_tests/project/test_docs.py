"""The pages agree with the repository: links and paths exist, and every warning is explained."""

import ast
import re

import pytest
from helpers.places import ROOT

from tools.docs import domain_texts, notebooks
from tools.docs.hooks import links

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")],
    key=str,
)
GENERATED = {"docs/reference/cli.md"}  # by the hook, when the site is built
# A file or folder of the repository, in backticks and without a placeholder.
PATH = re.compile(r"`((?:csrc|docs|profiling|python_tests|specdec_ext|tools)/[\w./-]*)`")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs and code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page):
    name, text = page.relative_to(ROOT).as_posix(), page.read_text("utf-8")
    linked = set(links(name, text)) - GENERATED
    named = set(PATH.findall(text))
    assert not [path for path in linked | named if not (ROOT / path).exists()]
    for link, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", text):
        target = (page.parent / link).resolve() if link else page
        assert anchor in anchors(target.read_text("utf-8")), f"{link}#{anchor}"


RESULTS = sorted((ROOT / "profiling" / "results").rglob("*.md"), key=str)


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_of_results_exist(page):
    """Old results may name files that have moved; what they show is beside them."""
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text("utf-8"))
    assert not [name for name in shown if not (page.parent / name).exists()]


def test_broken_link_is_found():
    text = "[a](b.md#c) [d](https://e.f) ![g](../h.png)\n```\nx[0](y)\n```\n"
    assert links("docs/internals/page.md", text) == ["docs/internals/b.md", "docs/h.png"]


def test_every_page_is_in_the_navigation():
    listed = set(
        re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    )
    docs = ROOT / "docs"
    written = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    from_notebooks = {
        page.relative_to(docs).with_suffix(".md").as_posix() for page in docs.rglob("*.ipynb")
    }
    assert listed == written | from_notebooks | {"reference/cli.md"}


def test_the_page_of_a_notebook_shows_text_code_and_output():
    plain = {"text/plain": "Tree()"}
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]},
        {"output_type": "execute_result", "data": {"text/html": "<b>T</b>", **plain}},
        {"output_type": "display_data", "data": {"image/png": "iVBO\n", **plain}},
        {"output_type": "execute_result", "data": plain},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text."]},
        {"cell_type": "code", "source": ["print(1)\n", "print(2)"], "outputs": outputs},
    ]
    assert notebooks.page({"cells": cells}, "first.ipynb").split("\n\n") == [
        "# Title\nText.",
        "```python\nprint(1)\nprint(2)\n```",
        '```text title="output"\n1\n2\n```',
        "<div><b>T</b></div>",
        "![output](data:image/png;base64,iVBO)",
        '```text title="output"\nTree()\n```',
        '<a href="../first.ipynb" download>Download this notebook</a>\n',
    ]


def test_the_example_of_training_holds_out_every_paragraph_of_its_prompts():
    texts = [f"title {i}\n\nshared\n\n" + f"text {i} " * (290 - i) for i in range(60)]
    pieces, held_out = domain_texts.split(texts)
    trained = {paragraph for piece in pieces for paragraph in piece.split("\n\n")}
    assert len(held_out) == 12 and len(pieces) > 12
    assert not trained & {paragraph for text in held_out for paragraph in text.split("\n\n")}


def test_every_file_that_warns_is_in_troubleshooting():
    """The page tells for each warning which file it comes from."""
    warns = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "specdec_ext").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
    }
    explained = set(
        PATH.findall((ROOT / "docs" / "guide" / "troubleshooting.md").read_text("utf-8"))
    )
    assert warns == explained
