"""Options that take several values with commas between them."""

from __future__ import annotations

import re

_NATURAL = r"[1-9]\d{0,4}"
NUMBER = r"(?:\d{1,9}\.?\d*|\.\d+)"


def split(text: str, option: str, pattern: str, expected: str) -> list[str]:
    """The different values of an option, each of which matches a pattern; [] for an empty text.

    Raises:
        ValueError: if one does not match.
    """
    parts = [each.strip() for each in text.split(",")] if text else []
    if not all(re.fullmatch(pattern, each) for each in parts):
        raise ValueError(f"{option} {text}: expected {expected}")
    return list(dict.fromkeys(parts))


def naturals(text: str, option: str) -> list[int]:
    """The values of an option of whole numbers from 1 on.

    Raises:
        ValueError: if there are none, or others.
    """
    expected = "numbers with commas between them, such as 1,4"
    parts = split(text, option, _NATURAL, expected)
    if not parts:
        raise ValueError(f"{option} is empty; expected numbers such as 1,4")
    return [int(each) for each in parts]


def numbers(text: str, option: str) -> list[float]:
    """The values of an option of numbers from 0 on; [] for an empty text.

    Raises:
        ValueError: if one is no number.
    """
    expected = "numbers with commas between them, such as 0,0.8"
    return list(dict.fromkeys(map(float, split(text, option, NUMBER, expected))))
