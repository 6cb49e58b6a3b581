"""The two formats of files: plain prompts, and OpenAI's batch files."""

from __future__ import annotations

import hashlib
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec_ext.batch.lines import Line
from specdec_ext.serve.http.errors import ApiError, shown

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_URLS = (COMPLETIONS, CHATS)
DIGITS = 32  # of the digest of a request


@dataclass(frozen=True)
class BatchRequest:
    """What a line asks of the server's application.

    Attributes:
        url: the path of the endpoint.
        body: the body of the request.
        name: the ``custom_id`` of the line; "" if it has none.
    """

    url: str
    body: dict[str, Any]
    name: str = ""

    @property
    def digest(self) -> str:
        """By which a record shows that it answers this request, with the options of the run."""
        text = json.dumps([self.url, self.name, self.body], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


@dataclass(frozen=True)
class BatchAnswer:
    """What the application answered.

    Attributes:
        status: HTTP status; 200 for a text.
        request_id: the id of the request in the log; "" if it was refused.
        body: the body of the answer.
    """

    status: int
    request_id: str
    body: dict[str, Any]


class Format(ABC):
    """How lines become requests, and answers become records.

    Attributes:
        start: the first bytes of every record.
    """

    start: bytes

    @abstractmethod
    def request(self, line: Line) -> BatchRequest:
        """The request of a line, with the options of the run; called for each line in their order.

        Raises:
            ApiError: the line is not a request.
        """

    @abstractmethod
    def record(self, line: Line, answer: BatchAnswer) -> dict[str, Any]:
        """The record of an answer."""

    @abstractmethod
    def refusal(self, line: Line, error: ApiError) -> dict[str, Any]:
        """The record of a line that is not a request."""

    @abstractmethod
    def answers(self, record: Any, line: Line) -> bool:
        """Whether a record of an earlier run is that of this line.

        A line whose record has an error may have been mended since. Otherwise, it must be the same request.
        """

    def _is_same(self, line: Line, digest: Any) -> bool:
        try:
            return bool(self.request(line).digest == digest)
        except ApiError:
            return False

    @abstractmethod
    def has_failed(self, record: dict[str, Any]) -> bool:
        """Whether a record has an error in place of a text."""


class PlainFormat(Format):
    """A line is a prompt, or the body of a request; a record has the number of its line.

    Args:
        defaults: fields of the body, for lines that leave them out.
        seed: the seed of line 1, unless it has one; that of line 2 is one more, and so on. None draws seeds.
    """

    start = b'{"line": '

    def __init__(self, defaults: Mapping[str, Any], seed: int | None = None):
        self._defaults, self._seed = dict(defaults), seed

    def request(self, line: Line) -> BatchRequest:
        content = _checked(line)
        if isinstance(content, str):
            content = {"prompt": content}
        if not isinstance(content, dict) or ("prompt" in content) == ("messages" in content):
            raise _bad_line(
                "expected a text, or an object with either 'prompt' or 'messages', "
                f"got {shown(content)}"
            )
        body = {name: value for name, value in content.items() if value is not None}
        _check_whole(body)
        if body.get("n", 1) != 1 or _is_several(body.get("prompt")):
            raise _bad_line("expected one prompt and n=1, because a record has one text")
        defaults = dict(self._defaults)
        if self._seed is not None:
            defaults["seed"] = self._seed + line.number - 1
        if "max_completion_tokens" in body:  # another name of max_tokens
            defaults.pop("max_tokens", None)
        return BatchRequest(CHATS if "messages" in body else COMPLETIONS, {**defaults, **body})

    def record(self, line: Line, answer: BatchAnswer) -> dict[str, Any]:
        if answer.status != 200:
            return {"line": line.number, **answer.body}
        (choice,) = answer.body["choices"]
        told = {name: value for name, value in choice.items() if value is not None}
        del told["index"]
        digest = self.request(line).digest
        return {"line": line.number, "request": digest, **told, "usage": answer.body["usage"]}

    def refusal(self, line: Line, error: ApiError) -> dict[str, Any]:
        return {"line": line.number, **error.body}

    def answers(self, record: Any, line: Line) -> bool:
        if not isinstance(record, dict) or record.get("line") != line.number:
            return False
        return self.has_failed(record) or self._is_same(line, record.get("request"))

    def has_failed(self, record: dict[str, Any]) -> bool:
        return "error" in record


class OpenAIFormat(Format):
    """OpenAI's batch files: lines with ``custom_id``, ``method``, ``url`` and ``body``.

    Records have ``id``, ``custom_id``, ``response`` and ``error``. ``error`` is for lines that are not
    requests; a request that is refused has a response with the status and the body that a server sends.
    Source: OpenAI, API reference, "The request input object" and "The request output object" of batches.
    """

    start = b'{"id": "batch_req_'
    FIELDS = ("custom_id", "method", "url", "body")

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}  # custom_id -> its line

    def request(self, line: Line) -> BatchRequest:
        content = _checked(line)
        if not isinstance(content, dict):
            raise _bad_line(f"expected an object, got {shown(content)}")
        for name in content:
            if name not in self.FIELDS:
                raise _bad_line(f"the field {shown(name)} is not known; expected {self.FIELDS}")
        self._check_id(line)
        method, url, body = (content.get(name) for name in self.FIELDS[1:])
        if method != "POST":
            raise _bad_line(f"method: expected 'POST', got {shown(method)}", "method")
        if url not in _URLS:
            raise _bad_line(f"url: expected one of {_URLS}, got {shown(url)}", "url")
        if not isinstance(body, dict):
            raise _bad_line(f"body: expected an object, got {shown(body)}", "body")
        _check_whole(body)
        return BatchRequest(url, body, _custom_id(line) or "")

    def _check_id(self, line: Line) -> None:
        custom_id = _custom_id(line)
        if custom_id is None:
            given = shown(line.content.get("custom_id"))
            raise _bad_line(f"custom_id: expected a text, got {given}", "custom_id")
        first = self._lines.setdefault(custom_id, line.number)
        if first != line.number:
            raise _bad_line(
                f"custom_id: line {first} has {shown(custom_id)} too, and answers are found by it; give each "
                "line its own",
                "custom_id",
                "duplicate_custom_id",
            )

    def record(self, line: Line, answer: BatchAnswer) -> dict[str, Any]:
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": answer.body,
        }
        return self._record(line, self.request(line).digest, response, None)

    def refusal(self, line: Line, error: ApiError) -> dict[str, Any]:
        message = f"line {line.number}: {error.body['error']['message']}"
        return self._record(line, uuid.uuid4().hex, None, {"code": error.code, "message": message})

    def _record(self, line: Line, name: str, response: Any, error: Any) -> dict[str, Any]:
        return {
            "id": f"batch_req_{name}",
            "custom_id": _custom_id(line),
            "response": response,
            "error": error,
        }

    def answers(self, record: Any, line: Line) -> bool:
        if not isinstance(record, dict) or not {"custom_id", "response", "error"} <= record.keys():
            return False
        response = record["response"]
        if not (response is None or (isinstance(response, dict) and "status_code" in response)):
            return False
        if response is None and record["custom_id"] is None:  # of a line that could not be read
            return True
        if record["custom_id"] != _custom_id(line):
            return False
        digest = str(record.get("id")).removeprefix("batch_req_")
        return self.has_failed(record) or self._is_same(line, digest)

    def has_failed(self, record: dict[str, Any]) -> bool:
        return record["response"] is None or record["response"]["status_code"] != 200


def format_of(lines: Iterable[Line], defaults: Mapping[str, Any], seed: int | None) -> Format:
    """The format of a file: OpenAI's if its first object has a ``custom_id`` or a ``body``, else plain.

    Args:
        lines: the lines of the file.
        defaults, seed: as for :class:`PlainFormat`.
    """
    for line in lines:
        if isinstance(line.content, dict):
            if line.content.keys() & {"custom_id", "body"}:
                return OpenAIFormat()
            break
    return PlainFormat(defaults, seed)


def _checked(line: Line) -> Any:
    if line.problem is not None:
        raise _bad_line(line.problem)
    return line.content


def _check_whole(body: Mapping[str, Any]) -> None:
    if body.get("stream"):
        raise _bad_line("stream: answers are written as a whole; leave it out", "stream")


def _is_several(prompt: Any) -> bool:
    return isinstance(prompt, list) and any(isinstance(each, (str, list)) for each in prompt)


def _custom_id(line: Line) -> str | None:
    """The id of a line of OpenAI's format; None if it has none that can be used."""
    found = line.content.get("custom_id") if isinstance(line.content, dict) else None
    return found if isinstance(found, str) and found else None


def _bad_line(message: str, param: str | None = None, code: str = "invalid_line") -> ApiError:
    return ApiError(400, message, param, code)
