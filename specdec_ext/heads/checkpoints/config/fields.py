"""``Fields``: read values of a config.json with a check of their type and range.

A config can't be trusted: a number may be a string, a size negative or larger than any memory. A value that
is read through ``Fields`` has the requested type, or an error names its place and value. A field that is null
counts as absent, as in transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from reprlib import Repr
from typing import Any

# Upper limit of a size, larger than that of any model; products of such sizes stay harmless.
MAX_SIZE = 2**24

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlevel = 3


def shown(value: Any) -> str:
    """Return a value shortened for a message: JSON may be long and deeply nested."""
    return _short.repr(value)


class Fields:
    """A JSON object.

    Args:
        values: the object.
        where: its name in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def section(self, name: str) -> Fields:
        """Return an object inside this one; an empty one if it is absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._error(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def integer(
        self, name: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE
    ) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._error(name, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int = 1, high: int = MAX_SIZE) -> int | None:
        return self.integer(name, low=low, high=high) if name in self else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._error(name, "a number above 0")
        if not 0 < value <= sys.float_info.max:  # also refuses NaN and an integer of 400 digits
            raise self._error(name, "a finite number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def optional_flag(self, name: str) -> bool | None:
        return self.flag(name, False) if name in self else None

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self._error(name, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._error(name, "a list of strings")
        return value

    def integers(self, name: str) -> list[int] | None:
        value = self.values.get(name)
        if value is None:
            return None
        whole = isinstance(value, list) and all(type(each) is int for each in value)
        if not whole:
            raise self._error(name, "a list of integers")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def _error(self, name: str, expected: str) -> ValueError:
        if name not in self:
            return ValueError(f"{self.where} has no {name}; expected {expected}")
        return ValueError(
            f"{self.where}: {name} is {shown(self.values[name])}; expected {expected}"
        )
