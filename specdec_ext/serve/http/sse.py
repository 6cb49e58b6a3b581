"""Server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from specdec_ext.serve.http.errors import as_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each JSON text of an iterator as an event, and ``[DONE]`` at the end.

    An exception becomes an event with OpenAI's error object, because the status line was sent before; no
    ``[DONE]`` follows.

    Args:
        texts: the iterator; it is closed if the client leaves.
        headers: headers of the answer.
        close: called at the end, also if the client left before the first event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, texts: AsyncGenerator[str, None], headers: dict[str, str], close: Callable[[], object]
    ):
        # Proxies must pass each event on at once.
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**headers, **fixed})
        del self.headers["content-length"]
        self._texts, self._close = texts, close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            await while_connected(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Any) -> None:
        async def event(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for text in self._texts:
                await event(b"data: " + text.encode() + b"\n\n")
        except Exception as error:
            body = json.dumps(as_api_error(error).body)
            await event(b"data: " + body.encode() + b"\n\n", more=False)
        else:
            await event(DONE, more=False)
        finally:
            await self._texts.aclose()


async def while_connected(receive: Any, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work`` to its end; if the client leaves, cancel it and return None."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def answer_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """:func:`while_connected` for an endpoint whose body was read."""
    return await while_connected(request.receive, work)


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
