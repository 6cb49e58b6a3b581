"""``run_load``: streams of completions to a server, and when their tokens arrived."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx2 as httpx

from specdec_ext import assets


@dataclass
class Reply:
    """What a client saw of one completion.

    Attributes:
        began: when it was requested, in seconds of ``time.perf_counter``, like ``arrivals``.
        arrivals: when each piece of text arrived.
        pieces: the text.
    """

    began: float
    arrivals: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)

    @property
    def first(self) -> float:
        """Seconds until the first piece arrived."""
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between the pieces."""
        return [later - one for one, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


def prompts() -> Iterator[str]:
    """The held-out prompts again and again, no two of which begin alike: servers may keep what they read."""
    texts = cycle(each["prompt"] for each in assets.held_out_prompts())
    return (f"# {number}\n{text}" for number, text in enumerate(texts))


async def complete(http: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
    """Request a completion as a stream and read it.

    Raises:
        RuntimeError: the server does not answer with status 200 and some text.
    """
    reply = Reply(time.perf_counter())
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if not data.startswith("{"):
                continue
            for choice in json.loads(data).get("choices", []):
                if choice.get("text"):
                    reply.arrivals.append(time.perf_counter())
                    reply.pieces.append(choice["text"])
    if not reply.pieces:
        raise RuntimeError("the server sent no text")
    return reply


def run_load(url: str, bodies: Sequence[dict[str, Any]], streams: int) -> tuple[list[Reply], float]:
    """Let ``streams`` clients request completions, each one after another, until all are done.

    Args:
        url: of the server.
        bodies: the requests; client i sends those with the numbers i, i + streams, ...
        streams: number of clients.

    Returns:
        The replies, in the order of ``bodies``, and the seconds that all of them took.
    """

    async def run() -> tuple[list[Reply], float]:
        replies: dict[int, Reply] = {}

        async def client(first: int) -> None:
            for number in range(first, len(bodies), streams):
                replies[number] = await complete(http, bodies[number])

        limits = httpx.Limits(max_connections=streams)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            began = time.perf_counter()
            await asyncio.gather(*map(client, range(streams)))
            seconds = time.perf_counter() - began
        return [replies[number] for number in range(len(bodies))], seconds

    return asyncio.run(run())
