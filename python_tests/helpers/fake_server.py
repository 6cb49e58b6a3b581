"""A server with OpenAI's API whose answers a test writes: texts, usage, errors, anything at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Event = dict[str, Any] | bytes
DONE = b"data: [DONE]\n\n"


def completion(
    *pieces: str, tokens: list[int] | None = None, total: int | None = None, **last: Any
) -> list[Event]:
    """The events of a completion.

    Args:
        pieces: the text of each event.
        tokens: tokens of each event, told beside it; None tells the total alone.
        total: tokens in all; None for one per event.
        last: further fields of the event with the usage.
    """
    total = total if total is not None else sum(tokens or [1] * len(pieces))
    events: list[Event] = []
    for number, piece in enumerate(pieces):
        event: dict[str, Any] = {"choices": [{"text": piece, "finish_reason": None}]}
        if tokens is not None:
            event["usage"] = {
                "prompt_tokens": 5,
                "completion_tokens": sum(tokens[: number + 1]),
            }
        events.append(event)
    events.append({"choices": [{"text": "", "finish_reason": "length"}]})
    usage = {"prompt_tokens": 5, "completion_tokens": total}
    return [*events, {"choices": [], "usage": usage, **last}, DONE]


class FakeServer:
    """What the server answers, and what it was asked.

    Attributes:
        url: its address.
        models: the entries of ``/v1/models``, or a status and a body.
        answer: called with the body of a request; returns the events of a stream, a status and a body, or
            None to close the connection without an answer.
        keeps: whether a connection serves more than one request; otherwise the next one is lost on it.
        metrics: the page ``/metrics``; None for status 404.
        bodies: of all requests so far, with the path as ``path`` and the key as ``key``.
        most_at_once: most requests that were answered at the same time.
        pair: what ``/pair`` answers, or a status and a body; None for status 404.
    """

    def __init__(self, url: str):
        self.url = url
        self.models: Any = [{"id": "fake"}]
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: completion("a", "b")
        self.keeps = True
        self.metrics: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = self.running = 0
        self.lock = threading.Lock()
        self.pair: Any = None


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """A server on a free port, in a thread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        is_used = False  # whether this connection has served a request

        def do_GET(self) -> None:
            if self.path == "/pair" and fake.pair is not None:
                status, told = fake.pair if isinstance(fake.pair, tuple) else (200, fake.pair)
                self.send(status, json.dumps(told).encode())
            elif self.path == "/metrics" and fake.metrics is not None:
                self.send(200, fake.metrics.encode())
            elif self.path == "/v1/models" and isinstance(fake.models, tuple):
                self.send(*fake.models)
            elif self.path == "/v1/models":
                self.send(200, json.dumps({"data": fake.models}).encode())
            else:
                self.send(404, b"{}")

        def do_POST(self) -> None:
            if self.is_used and not fake.keeps:
                self.close_connection = True
                return None
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                key = self.headers.get("Authorization")
                fake.bodies.append({**body, "path": self.path, "key": key})
                fake.running += 1
                fake.most_at_once = max(fake.most_at_once, fake.running)
            try:
                answered = fake.answer(body)
            finally:
                with fake.lock:
                    fake.running -= 1
            if answered is None:
                self.close_connection = True
                return None
            if isinstance(answered, tuple):
                status, told = answered
                return self.send(
                    status, told if isinstance(told, bytes) else json.dumps(told).encode()
                )
            self.send(200, b"".join(map(_sent, answered)))

        def send(self, status: int, raw: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)
            self.is_used = True

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake = FakeServer(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _sent(event: Event) -> bytes:
    return event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode()
