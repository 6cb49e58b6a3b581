"""Log lines for operators: one per request, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, Literal

LogFormat = Literal["text", "json"]


def configure(log_format: LogFormat, level: str = "INFO") -> None:
    """Write the records of this package, and warnings of uvicorn and others, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    for name, least in (("specdec_ext", level), ("uvicorn", "WARNING"), ("py.warnings", level)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)
    logging.captureWarnings(True)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


class _Text(logging.Formatter):
    """``TIME LEVEL MESSAGE name=value ...``; values with spaces are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        values = (
            (name, json.dumps(value) if " " in str(value) else value)
            for name, value in _fields(record).items()
        )
        words = [_time(record), record.levelname, record.getMessage()]
        line = " ".join([*words, *(f"{name}={value}" for name, value in values)])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``message`` and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
