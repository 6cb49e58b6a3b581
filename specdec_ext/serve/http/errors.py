"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from specdec_ext.display.text import one_line
from specdec_ext.errors import EngineClosedError, EngineFullError

log = logging.getLogger(__name__)

_MOST_SHOWN = 80  # characters of a value in a message
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
RETRY_AFTER = 1  # seconds after which a client may try again when the engine is full


class ErrorObject(BaseModel):
    """The fields of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorObject


class ApiError(HTTPException):
    """An error that a client is told.

    Args:
        status: HTTP status.
        message: what was expected, what was given and the way out.
        param: path of the field, such as ``"messages.0.content"``.
        code: OpenAI's code for the error, if it has one.
        headers: headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer, or of an event in a stream."""
        kind = _TYPES.get(self.status_code)
        if kind is None:
            kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        error = ErrorObject(
            message=one_line(str(self.detail)),
            type=kind,
            param=None if self.param is None else one_line(self.param),
            code=self.code,
        )
        return ErrorBody(error=error).model_dump()

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def shown(value: Any) -> str:
    """A value that a client sent, short enough for a message."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told about an exception of ``Engine.submit`` or of a request of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFullError):
        headers = {"Retry-After": str(RETRY_AFTER)}
        return ApiError(429, str(error), code="engine_full", headers=headers)
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, ValueError):  # an argument that only the engine or transformers refuses
        return ApiError(400, str(error))
    return ApiError(500, f"the request failed with {type(error).__name__}: {error}")


def answer_errors(app: FastAPI) -> None:
    """Let ``app`` answer every error in OpenAI's format."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return refusal(request.url.path, _invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(
            error, ApiError
        ):  # of the framework: unknown paths and methods, broken JSON
            where = f"{request.method} {request.url.path}: " if error.status_code >= 404 else ""
            error = ApiError(error.status_code, f"{where}{error.detail}", headers=error.headers)
        return refusal(request.url.path, error)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return refusal(request.url.path, as_api_error(error))


def refusal(path: str, error: ApiError) -> JSONResponse:
    """The answer to a request that was not begun, and its line in the log."""
    level = logging.ERROR if error.status_code >= 500 else logging.INFO
    message = error.body["error"]["message"]
    fields = {"status": error.status_code, "path": path, "error": message}
    log.log(level, "refused", extra={"fields": fields})
    return error.response()


def _invalid(errors: Sequence[Any]) -> ApiError:
    """The first error of a body that does not fit its schema."""
    first = errors[0]
    path = [str(each) for each in first["loc"] if each != "body"]
    param = ".".join(path) or None
    where = f"{param}: " if param else "the body of the request: "
    kind = first["type"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body of the request is not valid JSON: {reason}")
    if kind == "extra_forbidden":
        return ApiError(
            400,
            f"{where}this field is not known, and nothing is ignored silently; leave it out",
            param,
            "unknown_field",
        )
    if kind == "missing":
        return ApiError(400, f"{where}this field is required", param, "missing_field")
    expected = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}{expected}, got {shown(first.get('input'))}", param)
