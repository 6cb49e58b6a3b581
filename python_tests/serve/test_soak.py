"""Thousands of requests of which many leave, are wrong or fail: nothing stays behind, and no text changes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.serving import MODEL, httpx, ids_of, serving, target, text_alone, tokenizer, until
from transformers import LogitsProcessor

from specdec_ext.engine import Engine, Handle
from specdec_ext.engine.request import Request
from specdec_ext.models.slots import SlotTarget
from specdec_ext.serve.answer import Answer

PATH = "/v1/completions"
CLIENTS = 12
PROMPTS = [
    "import os\n",
    "def read(path):\n",
    "class Queue:\n    def put(self, item):\n",
    "x = [1, 2,",
]
# A prompt that begins with this id fails after a few tokens.
FAILING = 7
WRONG = [
    b"{",
    b"[]",
    b'{"prompt": 3.5}',
    b'{"prompt": []}',
    b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "model": "another"}',
    b'{"prompt": "a", "top_q": 1}',
    b'{"prompt": [99999999]}',
    json.dumps({"prompt": [1] * 600}).encode(),
]


class Fails(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 5:
            raise RuntimeError("a processor failed")
        return scores


class FaultyEngine(Engine):
    """Requests that begin with ``FAILING`` have a processor that raises."""

    def submit(self, input_ids, **kwargs):
        if input_ids[0] == FAILING:
            kwargs["logits_processor"] = [Fails()]
        return super().submit(input_ids, **kwargs)


def calls_with_texts() -> list[tuple[dict, str]]:
    """Bodies of requests with the texts that ``generate`` has for them alone."""
    found = []
    for number, prompt in enumerate(PROMPTS * 3):
        body = dict(prompt=prompt, max_tokens=(1, 6, 13)[number % 3], temperature=0.0)
        arguments = dict(max_new_tokens=body["max_tokens"], do_sample=False)
        if number >= len(PROMPTS):
            body |= dict(temperature=0.8, top_p=0.9, seed=number)
            arguments |= dict(do_sample=True, temperature=0.8, top_p=0.9, top_k=0, seed=[number])
        found.append((body, text_alone(prompt, **arguments)))
    return found


class Clients:
    """Clients that send requests one after another, each of a random kind."""

    def __init__(self, url: str, seed: int = 0):
        self.calls, self.rng, self.seen = calls_with_texts(), random.Random(seed), Counter()
        self.http = httpx.AsyncClient(base_url=url, timeout=120)
        self.kinds = [self.whole, self.stream, self.leave, self.hang_up, self.wrong, self.fail]

    async def send(self, count: int) -> None:
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                (kind,) = self.rng.choices(self.kinds, [30, 25, 15, 10, 12, 8])
                await kind()
                self.seen[kind.__name__] += 1

        async with self.http:
            await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def whole(self) -> None:
        body, text = self.rng.choice(self.calls)
        answer = await self.http.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text

    async def stream(self) -> None:
        body, text = self.rng.choice(self.calls)
        events = [event async for event in self.events(body)]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(each)["choices"][0]["text"] for each in events) == text

    async def leave(self) -> None:
        """Close the connection after some events of a long text."""
        wanted = self.rng.randrange(1, 5)
        async for _ in self.events({**self.rng.choice(self.calls)[0], "max_tokens": 200}):
            wanted -= 1
            if not wanted:
                return

    async def hang_up(self) -> None:
        """Close the connection at any time before the answer."""
        with suppress(httpx.TimeoutException):
            body = {**self.rng.choice(self.calls)[0], "max_tokens": 200}
            await self.http.post(PATH, json=body, timeout=self.rng.random() * 0.1)

    async def wrong(self) -> None:
        headers = {"content-type": "application/json"}
        answer = await self.http.post(PATH, content=self.rng.choice(WRONG), headers=headers)
        assert answer.status_code in (400, 404), answer.text

    async def fail(self) -> None:
        body = {"prompt": [FAILING, 5, 9], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        answer = await self.http.post(PATH, json=body)
        assert answer.status_code == 500
        assert "a processor failed" in answer.json()["error"]["message"]

    async def events(self, body: dict):
        async with self.http.stream("POST", PATH, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line:
                    yield line.removeprefix("data: ")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alive() -> Counter:
    """Objects of requests that still exist."""
    gc.collect()
    kinds = {Request, Handle, Answer, SlotTarget}
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


@pytest.mark.parametrize(
    "count", [240, pytest.param(10_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_nothing_stays_behind(count):
    engine = FaultyEngine(target(), drafter="auto", tokenizer=tokenizer(), max_rows=6)
    with serving(engine=engine) as server:
        sizes = []
        before = alive()
        for quarter in range(4):
            clients = Clients(server.url, seed=quarter)
            asyncio.run(clients.send(count // 4))
            assert min(clients.seen[kind.__name__] for kind in clients.kinds) >= 1
            until(lambda: engine.load.running == engine.load.waiting == 0)
            until(lambda: alive() == before)
            sizes.append((resident(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
        answer = server.client.completions.create(
            model=MODEL, prompt=ids_of(PROMPTS[0]), max_tokens=20, temperature=0
        )
        assert answer.choices[0].text == text_alone(PROMPTS[0], max_new_tokens=20, do_sample=False)
    if count >= 10_000:
        memory = [size for size, *_ in sizes]
        assert memory[-1] - memory[0] < 16 * 2**20, memory
    assert len({threads for _, threads, _ in sizes}) == 1, sizes
    assert sizes[-1][2] <= sizes[0][2] + 2, sizes
