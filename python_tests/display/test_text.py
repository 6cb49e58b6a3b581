"""No text changes how other text is shown: not in a terminal, not in a notebook, not in a table."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from specdec_ext.display import Summarised, Table
from specdec_ext.display.console import WIDTH, plain_text
from specdec_ext.display.text import byte_size, counted, one_line, printable

ODD = st.text(st.sampled_from("<>&\"'[]/\\:x1 \n\t\x1b\x07\u202e\u2028日é🚨\ud800{}%")) | st.text()


class Texts(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


@given(ODD)
def test_any_text_in_a_table(text):
    table = Table([(text, "1")], ("name", text), text)
    found = Texts(table.html())
    assert sorted(found.tags) == sorted(
        [
            "table",
            *["caption"] * bool(text),
            "thead",
            "tbody",
            *["tr"] * 2,
            *["th"] * 2,
            *["td"] * 2,
        ]
    )
    if text:
        assert printable(text) in found.texts
    for line in plain_text(table).split("\n"):
        assert cell_len(line) <= WIDTH and "\x1b" not in line and "\x07" not in line


@given(ODD)
def test_any_text_in_a_summary(text):
    class Result(Summarised):
        def summary(self):
            return text

    assert Texts(Result()._repr_html_()).tags == ["p"]
    assert "\n" not in str(Result()) and "\x1b" not in str(Result())
    assert all(cell_len(line) <= WIDTH for line in Result().explain().split("\n"))


@given(ODD)
def test_one_line(text):
    line = one_line(text)
    assert (line == printable(line) and line.split() == line.split(" ")) or not line


def test_markup_is_text():
    assert plain_text("[red]x[/red] :smile:") == "[red]x[/red] :smile:"


def test_a_summary_that_is_too_long_is_cut():
    class Result(Summarised):
        def summary(self):
            return "word " * 100

    assert len(str(Result())) == 200 and str(Result()).endswith(" ...")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5120.0 GiB")]
)
def test_byte_size(count, text):
    assert byte_size(count) == text


def test_counted():
    assert [counted(n, "row") for n in (0, 1, 1234)] == ["0 rows", "1 row", "1,234 rows"]
