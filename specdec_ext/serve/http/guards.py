"""Middleware that refuses requests before they are read: keys and the size of the body."""

from __future__ import annotations

import hmac
from typing import Any

from specdec_ext.serve.http.errors import ApiError, refusal

# Probes, Prometheus and browsers that open the page come without a key, and the answers hold no text.
OPEN_PATHS = ("/health", "/metrics", "/", "/page.js", "/page.css")


class KeyGuard:
    """Refuses requests without the key, ``Authorization: Bearer KEY``."""

    def __init__(self, app: Any, key: str):
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            # Comparing takes the same time wherever the first difference is.
            is_right = hmac.compare_digest(given.strip(), self._key)
            if scheme.lower() != b"bearer" or not is_right:
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send the header 'Authorization: Bearer KEY' with the "
                    "key that the server was started with",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refusal(scope["path"], error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyGuard:
    """Refuses bodies that are too large, at the latest when the bytes beyond the limit arrive."""

    def __init__(self, app: Any, max_bytes: int):
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            error = self._error(int(announced))
            await refusal(scope["path"], error)(scope, receive, send)
            return
        received = 0

        async def counted() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._error(received)
            return message

        await self._app(scope, counted, send)

    def _error(self, size: int) -> ApiError:
        return ApiError(
            413,
            f"the body of the request has {size} bytes or more; expected at most {self._max_bytes} "
            "(--max-body-bytes)",
            code="body_too_large",
        )
