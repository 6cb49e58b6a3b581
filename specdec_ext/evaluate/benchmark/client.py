"""``Server``: streamed requests to a server with OpenAI's API, and when their tokens arrived.

Servers differ in what they understand. ``Server.connect`` asks once with every field that a measurement can
use, and leaves out those that the server refuses. A wrong answer is a failed request with a reason, never an
exception in the middle of a measurement.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from specdec_ext.display.text import one_line
from specdec_ext.evaluate.benchmark.prompts import Question
from specdec_ext.evaluate.benchmark.reply import MAX_MESSAGE, Reply, message_of, parsed
from specdec_ext.heads.checkpoints.config.fields import Fields, shown
from specdec_ext.preflight.address import Address
from specdec_ext.preflight.extras import require
from specdec_ext.serve import names
from specdec_ext.stats import SpeculationStats
from specdec_ext.tree.config import MAX_NODES

CHAT, COMPLETIONS = "chat/completions", "completions"
OURS = "specdec_ext"  # the owner that our server names for its model
PROBE_TOKENS = 16  # of the requests that try fields; fewer might have no text
MAX_BYTES = 16 << 20  # of one event, or of an answer that is no stream

# Fields that a measurement can do without, and what is lost then.
OPTIONAL = {
    "continuous_usage_stats": "it does not tell the tokens of each chunk",
    "ignore_eos": "texts end where the model ends them, so their lengths may differ",
    "seed": "sampled texts can't be repeated",
    "cache_salt": "",  # vLLM keeps requests with different salts apart in its cache of prompts
}
_REFUSED = (400, 404, 422)  # statuses that may be about a field or an endpoint
_COUNTERS = {
    f"{names.DRAFTS}_total": "drafts",
    f"{names.DRAFT_TOKENS}_total": "draft_tokens",
    f"{names.ACCEPTED_TOKENS}_total": "accepted_tokens",
}
_BY_POSITION = f"{names.ACCEPTED_PER_POSITION}_total"

# No answer, or a wrong key: the other endpoint would not answer either. Other errors may be about a chat
# alone: servers break in different ways if a model has no chat template.
_HOPELESS = (0, 401, 403)
NO_COUNT = "the server counts no tokens (stream_options.include_usage), so speed is not known"

T = TypeVar("T")


class Server:
    """A server that is measured; a context manager.

    Args:
        url: its address, such as ``http://127.0.0.1:8000``. A path, such as ``/v1``, is that of the API;
            without one it is ``/v1``.
        model: name of the model; None for the only one that it serves.
        api_key: sent with every request.
        timeout: seconds that a request may take.
        option: the option that named it, for messages.

    Attributes:
        name: scheme, host and port.
        model: name of the model, once it is connected.
        is_ours: whether it is ``specdec serve``, which decodes without drafts on request.
        endpoint: ``CHAT`` or ``COMPLETIONS``.
        fields: those of ``OPTIONAL`` that it takes.
        counts_events: whether each event with text is taken for one token, because it counts none in streams.

    Raises:
        ValueError: if ``url`` is no address.
        ImportError: if httpx2 is not installed.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600,
        option: str = "--url",
    ):
        http = require("httpx2", option)
        address = Address.parse(url, option)
        self.name, self._origin = address.name, address.origin
        self._base = self._origin + (address.path or "/v1")
        self._where = f"{option} {self.name}"
        self.model, self.is_ours = model, False
        self.endpoint, self.fields = COMPLETIONS, list(OPTIONAL)
        self.counts_events = False
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        # What a connection raises that was kept, and that the server has closed since.
        self._closed = (http.RemoteProtocolError, http.ReadError, http.WriteError)
        # What may be raised by a server that answers wrongly or not at all.
        self._expected = (
            *(http.HTTPError, http.InvalidURL, http.StreamError),
            *(asyncio.TimeoutError, ValueError, OSError),
        )
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = http.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = http.AsyncClient(headers=headers, timeout=timeout, limits=limits)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._http.aclose())
        self._loop.close()

    def connect(self, question: Question, endpoints: Sequence[str]) -> None:
        """Find out the model's name, the first of ``endpoints`` that answers, and the fields that it takes.

        Raises:
            ValueError: if it does not answer, or can't count tokens; the message has its reason.
        """
        self._find_model()
        reasons = []
        for endpoint in endpoints:
            self.endpoint, self.fields = endpoint, list(OPTIONAL)
            reply = self.ask_all([question], 1, max_tokens=PROBE_TOKENS)[0]
            while reply.error and reply.status in _REFUSED and self.fields:
                named = [each for each in self.fields if each in reply.error]
                dropped = named or self.fields[-1:]
                self.fields = [each for each in self.fields if each not in dropped]
                reply = self.ask_all([question], 1, max_tokens=PROBE_TOKENS)[0]
            if reply.error == NO_COUNT and self._sends_tokens_one_by_one(question, reply):
                self.counts_events = True
                return
            if not reply.error:
                return
            reasons.append(f"{endpoint}: {reply.error}")
            if reply.status in _HOPELESS:
                break
        raise ValueError(f"{self._where}: {'; '.join(reasons)}")

    def _sends_tokens_one_by_one(self, question: Question, reply: Reply) -> bool:
        """Whether a stream without counts had as many events as the same answer as a whole has tokens."""
        try:
            whole = self.ask_whole(question, max_tokens=PROBE_TOKENS)
            usage = Fields(whole, "the server's answer").section("usage")
            return reply.has_one_event_per_token(usage.integer("completion_tokens", 0, low=0))
        except ValueError:
            return False

    def ask_all(
        self, questions: Sequence[Question], streams: int, ends: bool = False, **options: Any
    ) -> list[Reply]:
        """Send questions in their order, ``streams`` of them at a time: as one is answered, the next is sent.

        Args:
            questions: what is asked.
            streams: number of requests at a time.
            ends: whether the model ends its texts. Otherwise they have ``max_tokens`` tokens, if the server
                takes ``ignore_eos``.
            options: further fields of the requests.

        Returns:
            The replies in the order of the questions; those of failed requests have an ``error``.
        """
        replies: dict[int, Reply] = {}
        waiting = iter(enumerate(questions))

        async def stream() -> None:
            for number, question in waiting:
                body = self._body(question, ends, {"seed": number, **options})
                replies[number] = await self._ask(body)

        async def everything() -> None:
            await asyncio.gather(*(stream() for _ in range(min(streams, len(questions)))))

        self._run(everything())
        return [replies[number] for number in range(len(questions))]

    def ask_whole(self, question: Question, **options: Any) -> dict[str, Any]:
        """The JSON object with which the server answers a question without a stream.

        Raises:
            ValueError: if it does not; the message has its reason.
        """
        body = self._body(question, False, {"seed": 0, **options})
        del body["stream"], body["stream_options"]
        return self._told("POST", f"{self._base}/{self.endpoint}", json=body)

    def told(self, path: str) -> dict[str, Any]:
        """The JSON object that the server has at a path, such as ``"/pair"``.

        Raises:
            ValueError: if it has none; the message has its reason.
        """
        return self._told("GET", f"{self._origin}{path}")

    def counters(self) -> SpeculationStats | None:
        """vLLM's counters of speculation at ``/metrics``, over all requests so far; None without them."""
        try:
            status, raw = self._run(self._fetch("GET", f"{self._origin}/metrics"))
            return _counted_stats(raw.decode()) if status == 200 else None
        except (*self._expected, OverflowError):
            return None

    def _find_model(self) -> None:
        where = self._where
        try:
            status, raw = self._run(self._fetch("GET", f"{self._base}/models"))
            if status != 200 and self.model is not None:
                return  # some servers can't list their models, but answer
            if status != 200:
                raise ValueError(f"status {status}: {message_of(raw)}")
            models = parsed(raw).get("data")
        except self._expected as error:
            raise ValueError(
                f"{where}: no answer from {self._base}/models: {_reason(error)}"
            ) from error
        if not isinstance(models, list) or not all(
            isinstance(each, dict) and isinstance(each.get("id"), str) for each in models
        ):
            raise ValueError(f"{where}: /models answers {shown(models)}; expected a list of models")
        known = {each["id"]: each for each in models}
        if self.model is None:
            if len(known) != 1:
                listed = ", ".join(list(known)[:10]) or "none"
                raise ValueError(
                    f"{where} serves {len(known)} models ({listed}); pass one as MODEL"
                )
            (self.model,) = known
        elif known and self.model not in known:
            listed = ", ".join(list(known)[:10])
            raise ValueError(f"{where} serves no model {self.model}; it serves {listed}")
        self.is_ours = known.get(self.model, {}).get("owned_by") == OURS

    def _body(self, question: Question, ends: bool, options: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            **options,
        }
        if self.endpoint == CHAT:
            body["messages"] = question.chat
        else:
            body["prompt"] = question.text
        if "continuous_usage_stats" in self.fields:
            body["stream_options"]["continuous_usage_stats"] = True
        if "ignore_eos" in self.fields:
            body["ignore_eos"] = not ends
        if "cache_salt" in self.fields:
            body["cache_salt"] = uuid.uuid4().hex
        if "seed" not in self.fields:
            del body["seed"]
        return body

    async def _ask(self, body: dict[str, Any]) -> Reply:
        reply = Reply(time.perf_counter())
        try:
            await asyncio.wait_for(self._read(reply, body), self._timeout)
        except asyncio.TimeoutError:
            reply.error = f"no complete answer within {self._timeout:g} seconds"
        except self._expected as error:
            reply.error = _reason(error)
        reply.ended = time.perf_counter()
        return reply

    async def _read(self, reply: Reply, body: dict[str, Any]) -> None:
        """Send a request and add what is streamed to its reply.

        Raises:
            ValueError: it is refused, or the answer is not a complete stream of text with its usage.
        """
        is_complete = False
        async with self._posted(body) as answer:
            reply.status = answer.status_code
            if answer.status_code != 200:
                raw = await _limited(answer)
                raise ValueError(f"status {answer.status_code}: {message_of(raw)}")
            async for at, data in _events(answer):
                if data == b"[DONE]":
                    is_complete = True
                    break
                is_complete |= reply.add(at, parsed(data))
        if not reply.arrivals:
            raise ValueError(
                "the server sent no text; its log may say why, such as a prompt beyond its context"
            )
        if not is_complete:
            raise ValueError("the stream ended before the text did")
        if not reply.tokens and self.counts_events:
            reply.tokens = sum(reply.events)
        if not reply.tokens:
            raise ValueError(NO_COUNT)

    @asynccontextmanager
    async def _posted(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        """Send a request, once more if the server had closed the connection that was kept for it.

        Some servers close a connection after an error, and the next request on it is then lost unread. An
        error of a new connection is one of the server.
        """
        connected = False

        async def trace(event: str, _: Mapping[str, Any]) -> None:
            nonlocal connected
            connected |= event.startswith("connection.connect_")

        url = f"{self._base}/{self.endpoint}"
        async with AsyncExitStack() as stack:
            post = partial(self._http.stream, "POST", url, json=body, extensions={"trace": trace})
            try:
                answer = await stack.enter_async_context(post())
            except self._closed:
                if connected:
                    raise
                answer = await stack.enter_async_context(post())
            yield answer

    def _told(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        try:
            status, raw = self._run(self._fetch(method, url, **options))
            if status != 200:
                raise ValueError(f"status {status}: {message_of(raw)}")
            return parsed(raw)
        except self._expected as error:
            path = url.removeprefix(self._origin)
            raise ValueError(f"{self.name}, {path}: {_reason(error)}") from error

    async def _fetch(self, method: str, url: str, **options: Any) -> tuple[int, bytes]:
        async with self._http.stream(method, url, **options) as answer:
            return answer.status_code, await _limited(answer)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:  # the server is told that nobody reads its answers
            task.cancel()
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
            raise


async def _limited(answer: Any) -> bytes:
    raw = b""
    async for part in answer.aiter_bytes():
        raw += part
        if len(raw) > MAX_BYTES:
            raise ValueError(f"the server's answer is longer than {MAX_BYTES} bytes")
    return raw


async def _events(answer: Any) -> AsyncIterator[tuple[float, bytes]]:
    """The time of arrival and the data of each server-sent event."""
    rest = b""
    async for part in answer.aiter_bytes():
        at = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MAX_BYTES:
            raise ValueError(f"an event of the stream is longer than {MAX_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[len(b"data:") :].strip()


def _counted_stats(page: str) -> SpeculationStats | None:
    parser = require("prometheus_client.parser", "--url")
    stats = SpeculationStats(drafter="server")
    by_position: dict[int, int] = {}
    found = set()
    for family in parser.text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in _COUNTERS:
                name = _COUNTERS[sample.name]
                setattr(stats, name, getattr(stats, name) + int(sample.value))
                found.add(name)
            elif sample.name == _BY_POSITION:
                position = int(sample.labels.get(names.POSITION, ""))
                if not 0 <= position < MAX_NODES:
                    raise ValueError(f"the server counts position {position}")
                by_position[position] = by_position.get(position, 0) + int(sample.value)
    stats.accepted_per_position = [by_position.get(each, 0) for each in range(len(by_position))]
    return stats if "drafts" in found else None


def _reason(error: Exception) -> str:
    text = one_line(str(error))[: 2 * MAX_MESSAGE]
    return (
        text if isinstance(error, ValueError) and text else f"{type(error).__name__} {text}".strip()
    )
