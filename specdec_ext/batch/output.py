"""``OutputFile``: a file of records that a later run goes on with."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec_ext.preflight.outputs import writable_file


class OutputFile:
    """The records of a batch, one JSON object per line; a context manager.

    Each record reaches the file before the next one is written, so a process that is killed leaves complete
    lines and at most one that is half-written.

    Args:
        path: the file; an existing one is kept.
        start: the first bytes of every record, by which the file of another program is recognised.

    Raises:
        OSError: it can't be written, or another run writes it now.
    """

    def __init__(self, path: Path, start: bytes):
        writable_file(path, "OUT")
        self.path, self._start = path, start
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise OSError(f"OUT {path}: another run writes this file; wait for its end") from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs write the file."""
        self._file.close()

    @contextmanager
    def replacement(self) -> Iterator[OutputFile]:
        """A file for other records, which replaces this one's at the end, and not after an error.

        Raises:
            OSError: it can't be written.
        """
        path = self.path.resolve()
        other = OutputFile(path.with_name(f"{path.name}.retry"), self._start)
        try:
            other.clear()  # what a run that was killed has left
            yield other
            os.fsync(other._file.fileno())
            other.path.replace(path)
        except BaseException:
            other.close()
            other.path.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = other._file

    def records(self) -> Iterator[Any]:
        """The records of earlier runs. A half-written last one is left out.

        Raises:
            ValueError: the file holds something else.
        """
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    if not (raw.startswith(self._start) or self._start.startswith(raw)):
                        raise self.foreign(number)
                    return
                try:
                    yield json.loads(raw)
                except (ValueError, RecursionError) as error:
                    raise self.foreign(number) from error

    def foreign(self, number: int) -> ValueError:
        """The error for a line that is not the record of its request."""
        return ValueError(
            f"OUT {self.path} line {number} is not the answer to its line of IN with these options, so the "
            "file is of another run; choose another file, the options of that run, or --overwrite"
        )

    def repair(self) -> None:
        """Remove a half-written last line."""
        with self.path.open("rb") as file:
            whole = sum(len(raw) for raw in file if raw.endswith(b"\n"))
        self._file.truncate(whole)

    def clear(self) -> None:
        """Remove all records."""
        self._file.truncate(0)

    def append(self, record: dict[str, Any]) -> None:
        """Write a record."""
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
