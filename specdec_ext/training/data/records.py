"""Read files of training text as records: texts, chats or tokens.

Supported files, in UTF-8:

- ``.txt``: one text. It is split at ends of lines into records of about ``TEXT_CHARACTERS`` characters.
- ``.jsonl`` (one object per line) and ``.json`` (a list of objects). Each object has a text (``"text"``), a
  chat (``"messages"``, ``"conversations"`` or ``"conversation"``: a list of ``{"role", "content"}`` or
  ``{"from", "value"}``), or tokens as ``regenerate`` writes them (``"tokens"``, and ``"answers"``: ranges
  ``[start, end)`` that the target wrote).
- ``.parquet``: rows with the same columns. It needs pyarrow.

The whole file is checked before it is used; error messages name file and line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec_ext.heads.checkpoints.config.fields import shown
from specdec_ext.preflight.extras import require
from specdec_ext.preflight.inputs import regular_file
from specdec_ext.training.data.batches import Example

Chat = list[dict[str, str]]

TEXT_CHARACTERS = 32_768
CHAT_COLUMNS = ("messages", "conversations", "conversation")
ROLES = {
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "user": "user",
    "human": "user",
    "system": "system",
    "tool": "tool",
}


@dataclass(frozen=True)
class Record:
    """One text, chat or tokenized text of a file.

    Attributes:
        where: file and line or entry, for messages.
        content: the text; the chat, as messages with "role" and "content"; or the tokens.
    """

    where: str
    content: str | Chat | Example

    def digest(self) -> bytes:
        """Return a hash of the content; it does not depend on file and line."""
        content = self.content
        if isinstance(content, Example):
            content = content.tokens.tolist()
        return hashlib.sha256(json.dumps(content).encode()).digest()


@dataclass
class Transcript:
    """A text of which the target wrote some parts.

    Attributes:
        tokens: all tokens of the text.
        answers: ranges ``(start, end)`` that the target wrote.
    """

    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)

    def example(self, max_length: int | None = None) -> Example:
        """Return the text as an example, cut to ``max_length`` tokens."""
        tokens = torch.tensor(self.tokens[:max_length], dtype=torch.int64, device="cpu")
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        for start, end in self.answers:
            mask[start:end] = True
        return Example(tokens, mask)


def read_records(
    path: str | Path,
    *,
    text_column: str | None = None,
    messages_column: str | None = None,
    vocab_size: int | None = None,
) -> list[Record]:
    """Read the records of a file, in their order.

    Args:
        path: a ``.txt``, ``.jsonl``, ``.json`` or ``.parquet`` file.
        text_column: name of the column of texts, by default ``"text"``.
        messages_column: name of the column of chats, by default one of ``CHAT_COLUMNS``.
        vocab_size: vocabulary size of the target, for a check of the tokens; None skips the check.

    Raises:
        ValueError: for an unsupported or empty file, text that is not UTF-8, invalid JSON, a record without
            the column, a message without text or with an unknown role, or tokens outside the vocabulary.
        OSError: for a file that can't be read; pipes and devices are not read.
    """
    path = Path(path)
    if text_column is not None and messages_column is not None:
        raise ValueError(
            f"text_column={text_column!r} and messages_column={messages_column!r} name two sources; "
            "pass only one of them"
        )
    if path.suffix == ".txt":
        pieces = _pieces(read_text(path))
        records = [
            Record(f"{path}, piece {n}", piece)
            for n, piece in enumerate(pieces, 1)
            if piece.strip()
        ]
    elif path.suffix in _ROWS:
        records = list(_records(read_rows(path), text_column, messages_column))
    else:
        raise ValueError(f"{path} is of an unsupported type; expected .txt, {', '.join(_ROWS)}")
    if not records:
        raise ValueError(f"{path} holds no text")
    if vocab_size is not None:
        _check_tokens(records, vocab_size)
    return records


def _check_tokens(records: Sequence[Record], vocab_size: int) -> None:
    for record in records:
        content = record.content
        if isinstance(content, Example) and int(content.tokens.max()) >= vocab_size:
            raise ValueError(
                f"{record.where} has token {int(content.tokens.max())}, but the target's vocabulary has "
                f"{vocab_size}. If another model wrote the file, let the target answer: --regenerate"
            )


def split_records(records: Sequence[Record], one_in: int = 50) -> tuple[list[Record], list[Record]]:
    """Split records into ``(training, held_out)`` by the hash of their content.

    The same content is always on the same side, in every file. About one record in ``one_in`` is held out; if
    none would be, the one with the smallest hash is.

    Raises:
        ValueError: for ``one_in`` below 2, or records that all have the same content.
    """
    if one_in < 2:
        raise ValueError(f"one_in is {one_in}; expected at least 2")
    digests = [record.digest() for record in records]
    if len(set(digests)) < 2:
        raise ValueError(
            f"{records[0].where if records else 'the data'}: a single text can't be split into training and "
            "held-out text; pass more texts, or a separate file of held-out text"
        )
    held_out = [int.from_bytes(digest[:8], "big") % one_in == 0 for digest in digests]
    if not any(held_out):
        held_out = [digest == min(digests) for digest in digests]
    elif all(held_out):
        held_out = [digest != min(digests) for digest in digests]
    return (
        [record for record, out in zip(records, held_out, strict=True) if not out],
        [record for record, out in zip(records, held_out, strict=True) if out],
    )


def _opened(path: Path) -> Path:
    return regular_file(path, "a file of texts")


def read_text(path: Path) -> str:
    """Read the text of a file.

    Raises:
        ValueError: if it is not a regular file or not UTF-8.
    """
    return _decoded(_opened(path).read_bytes(), str(path))


def read_rows(path: Path) -> list[tuple[str, Any]]:
    """Return (file and place, value) for every line of a ``.jsonl`` file, entry of a ``.json`` list or row of
    a ``.parquet`` file.

    Raises:
        ValueError: for text that is not UTF-8, invalid JSON, a ``.json`` file that holds no list, or a
            damaged ``.parquet`` file.
        ImportError: for a ``.parquet`` file if pyarrow is not installed.
    """
    return list(_ROWS[path.suffix](path))


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + TEXT_CHARACTERS) + 1
        end = end if end > start else start + TEXT_CHARACTERS
        yield text[start:end]
        start = end


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with _opened(path).open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path} line {number}"
            line = _decoded(raw, where)
            if line.strip():
                yield where, _parsed(line, where)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    text = read_text(path)
    if not text.strip():
        return
    rows = _parsed(text, str(path))
    if not isinstance(rows, list):
        raise ValueError(
            f"{path} holds a {type(rows).__name__}; expected a list. A file with one object per line must be "
            "named .jsonl"
        )
    for number, row in enumerate(rows, 1):
        yield f"{path} entry {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    parquet = require("pyarrow.parquet", f"{path}")
    try:
        rows = parquet.read_table(_opened(path)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these types
        raise ValueError(f"{path} is not a valid parquet file: {error}") from error
    for number, row in enumerate(rows, 1):
        yield f"{path} row {number}", row


_ROWS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _records(
    rows: list[tuple[str, Any]], text_column: str | None, messages_column: str | None
) -> Iterator[Record]:
    column = text_column or messages_column
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where} is {_kind(row)}; expected an object with a text or a chat")
        column = column or _column(where, row)
        if column not in row:
            raise ValueError(f"{where} has no column {column!r}; its columns are {_listed(row)}")
        if messages_column or (not text_column and column in CHAT_COLUMNS):
            yield Record(where, _chat(row[column], where))
        elif not text_column and column == "tokens":
            yield Record(where, transcript(row, where).example())
        else:
            yield Record(where, checked_text(row[column], f"{where}: column {column!r}"))


def _column(where: str, row: dict[str, Any]) -> str:
    found = [name for name in (*CHAT_COLUMNS, "text", "tokens") if name in row]
    if len(found) != 1:
        raise ValueError(
            f"{where}: its columns are {_listed(row)}; "
            + (f"several could be the training text: {found}" if found else "none is known")
            + "; name the column of texts (text_column) or chats (messages_column)"
        )
    return found[0]


def _chat(messages: Any, where: str) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: its chat is {_kind(messages)}; expected a list of messages")
    chat = []
    for number, message in enumerate(messages, 1):
        place = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise ValueError(f"{place} is {_kind(message)}; expected an object")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(
                f"{place}: role {shown(role)} is unknown; expected one of {sorted(ROLES)}"
            )
        text = checked_text(content, f"{place}: its content")
        chat.append({"role": ROLES[role], "content": text})
    return chat


def checked_text(value: Any, where: str) -> str:
    """Return ``value`` if it is a string that a tokenizer accepts.

    JSON strings may contain halves of surrogate pairs, which are not characters.

    Raises:
        ValueError: for anything else; the message begins with ``where``.
    """
    if not isinstance(value, str):
        raise ValueError(f"{where} is {_kind(value)}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is not text: {error}") from error
    return value


def transcript(row: dict[str, Any], where: str) -> Transcript:
    """Check and return a record's ``"tokens"`` and ``"answers"``; ``where`` is for the message.

    Raises:
        ValueError: if they are not a list of token ids and a list of ranges within it.
    """
    tokens = row.get("tokens")
    if not _all(tokens, lambda token: type(token) is int and 0 <= token < 2**31) or not tokens:
        raise ValueError(f'{where}: "tokens" is not a list of token ids')
    answers: Any = row.get("answers", [[0, len(tokens)]])
    if not _all(
        answers,
        lambda span: (
            _all(span, lambda edge: type(edge) is int)
            and len(span) == 2
            and 0 <= span[0] <= span[1] <= len(tokens)
        ),
    ):
        raise ValueError(
            f'{where}: "answers" is not a list of [start, end] within its {len(tokens)} tokens'
        )
    return Transcript(tokens, [(start, end) for start, end in answers])


def _all(values: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(holds(value) for value in values)


def _kind(value: Any) -> str:
    if value is None:
        return "missing or null"
    if isinstance(value, list | dict | str) and not value:
        return f"an empty {type(value).__name__}"
    return f"of type {type(value).__name__}"


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in row) or "none"
