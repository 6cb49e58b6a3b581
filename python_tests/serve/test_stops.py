"""No part of a stop string is ever emitted, and the cut does not depend on how the text arrives."""

from __future__ import annotations

import pytest
from helpers.serving import serving  # noqa: F401  (skips without the extra)
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_ext.serve.text.stops import StopStrings


def cut(text: str, stops: list[str]) -> str:
    """The definition: the text before the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [each for each in stops if text[:end].endswith(each)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.parametrize(
    "text, stops, expected",
    [
        ("abcd", ["c"], "ab"),
        ("abcd", ["bcd", "c"], "ab"),
        ("abc", ["bc", "c"], "a"),
        ("aab", ["ab"], "a"),
        ("abab", ["abc"], "abab"),
        ("x€", ["€"], "x"),
    ],
)
def test_examples(text, stops, expected):
    assert cut(text, stops) == expected
    whole = StopStrings(stops)
    assert whole.feed(text) + whole.flush() == expected


@given(
    st.lists(st.text("ab€", max_size=4), max_size=12),
    st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3),
)
@settings(deadline=None, max_examples=500)
def test_any_pieces(pieces, stops):
    expected = cut("".join(pieces), stops)
    cutter, told = StopStrings(stops), ""
    for piece in pieces:
        told += cutter.feed(piece)
        # A reader never sees text that is taken back.
        assert expected.startswith(told)
    told += cutter.flush()
    assert told == expected
    assert (cutter.found is not None) == any(stop in "".join(pieces) for stop in stops)


def test_only_what_may_be_a_stop_string_is_held_back():
    cutter = StopStrings(["END", "\n\n"])
    assert cutter.feed("text\n") == "text"
    assert cutter.feed("E") == "\n"
    assert cutter.feed("x") == "Ex"
    assert cutter.feed("EN") == ""
    assert cutter.flush() == "EN"
