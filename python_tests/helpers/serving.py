"""A server on the bundled model: the application in a thread with a port, and its clients."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

for _package in ("fastapi", "uvicorn", "openai", "prometheus_client", "httpx2"):
    pytest.importorskip(_package, reason=f"{_package} is not installed (extra: serve)")

import httpx2 as httpx  # noqa: E402
import openai  # noqa: E402
import uvicorn  # noqa: E402

import specdec_ext  # noqa: E402
from specdec_ext import assets  # noqa: E402
from specdec_ext.engine import Engine  # noqa: E402
from specdec_ext.engine.handle import Handle  # noqa: E402
from specdec_ext.engine.loop import EngineLoop  # noqa: E402
from specdec_ext.serve.app import create_app  # noqa: E402
from specdec_ext.serve.service import Settings  # noqa: E402

MODEL = "tiny-python"
PROMPT = "import os\n\n\ndef read(path):\n"
# The bundled model knows only Python, so messages become comments.
TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}# {{ tools | tojson }}\n{% endif %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('no such message') }}{% endif %}"
)


@functools.cache
def target():
    return assets.load_target()


@functools.cache
def tokenizer():
    return assets.load_tokenizer()


def ids_of(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


def alone(prompt: list[int], **kwargs) -> list[int]:
    """The new tokens of a call of its own, without drafts."""
    given = torch.tensor([prompt])
    output = specdec_ext.generate(target(), given, drafter=None, **kwargs)
    return output[0, len(prompt) :].tolist()


def text_alone(prompt: str, **kwargs) -> str:
    return tokenizer().decode(alone(ids_of(prompt), **kwargs), skip_special_tokens=True)


class Served:
    """A running server.

    Attributes:
        url: its address.
        engine: its engine.
        client: a client of OpenAI's package.
        http: a client for other requests.
    """

    def __init__(self, url: str, engine: Engine, key: str = "none"):
        self.url, self.engine = url, engine
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.http = httpx.Client(base_url=url, timeout=60)

    def asynchronous(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body):
        return self.http.post(path, json=body)


@contextmanager
def serving(
    engine_options: dict | None = None,
    engine: Engine | None = None,
    port: int = 0,
    **settings,
) -> Iterator[Served]:
    """A server on a port, by default a free one, in a thread."""
    if engine is None:
        # It always drafts, so its counters of drafts do not depend on the clock.
        options = {"speculation": "fixed", **(engine_options or {})}
        engine = Engine(target(), tokenizer=tokenizer(), **options)
    given = Settings(**{"model_name": MODEL, "chat_template": TEMPLATE, **settings})
    server = uvicorn.Server(
        uvicorn.Config(create_app(engine, given), host="127.0.0.1", port=port, log_config=None)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", engine, given.api_key or "none")
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server has not ended"


def until(condition, seconds: float = 30) -> None:
    """Wait until ``condition()`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.01)


@contextmanager
def held_steps(free: int = 0) -> Iterator[threading.Event]:
    """Engines do ``free`` steps, then wait before the next one until the event is set or the block is left.

    So a request runs for as long as a test needs it, whatever the machine's speed.
    """
    step, count, go = EngineLoop.step, itertools.count(), threading.Event()

    def held(self, *args, **kwargs) -> None:
        if next(count) >= free:
            assert go.wait(60), "the test has not let the engine go on"
        step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineLoop, "step", held)
        try:
            yield go
        finally:
            go.set()


def record_handles(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The handles of all requests that the engine accepts from now on; they are added as they come."""
    handles, submit = [], engine.submit

    def recorded(*args, **kwargs) -> Handle:
        handles.append(submit(*args, **kwargs))
        return handles[-1]

    monkeypatch.setattr(engine, "submit", recorded)
    return handles
