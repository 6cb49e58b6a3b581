"""Reads the lines of a file of requests; a line that can't be read does not stop the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Line:
    """A line that is not blank.

    Attributes:
        number: its number in the file, from 1; blank lines count.
        content: the value of its JSON; None if it could not be read.
        problem: why it could not be read, else None.
    """

    number: int
    content: Any = None
    problem: str | None = None


def read_lines(path: Path, max_bytes: int) -> Iterator[Line]:
    """The lines of a ``.jsonl`` file that are not blank; they are read one at a time.

    Args:
        path: a regular file.
        max_bytes: most bytes of a line; of longer ones, no more than that is kept in memory.
    """
    for number, raw in _raw_lines(path, max_bytes):
        if len(raw) > max_bytes:
            yield Line(
                number,
                problem=f"the line has more than {max_bytes} bytes, the most that it may have "
                "(--max-line-bytes)",
            )
        else:
            yield _parsed(number, raw)


def count_lines(path: Path, max_bytes: int) -> int:
    """The number of lines that :func:`read_lines` yields."""
    return sum(1 for _ in _raw_lines(path, max_bytes))


def _raw_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of each line that is not blank; one that is too long is cut behind the limit."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(max_bytes + 1):
            number += 1
            if not raw.endswith(b"\n"):
                _skip_line(file, max_bytes)
            raw = raw.removesuffix(b"\n")
            if len(raw) > max_bytes or raw.strip():
                yield number, raw


def _skip_line(file: BinaryIO, max_bytes: int) -> None:
    while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
        pass


def _parsed(number: int, raw: bytes) -> Line:
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        return Line(number, json.loads(text))
    except UnicodeDecodeError as error:
        return Line(number, problem=f"the line is not UTF-8 text: {error}")
    except (ValueError, RecursionError) as error:
        return Line(number, problem=f"the line is not valid JSON: {error}")
