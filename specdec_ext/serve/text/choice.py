"""``Choice``: one text of a request as it grows, and the choices of a request together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_ext.display.detokenize import IncrementalDecoder
from specdec_ext.engine import Burst, Handle, TokenLogprobs
from specdec_ext.errors import EngineClosedError
from specdec_ext.serve.http.errors import ApiError
from specdec_ext.serve.text.marks import Marks, Part, append
from specdec_ext.serve.text.stops import StopStrings


@dataclass
class Piece:
    """What a choice gains when its client is told more.

    Attributes:
        parts: the parts of the text that is certain; neighbours differ in ``drafted``.
        logprobs: (id, log probabilities) of the tokens; empty if they were not requested.
        is_last: whether the choice has ended.
    """

    parts: list[Part] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    is_last: bool = False

    @property
    def text(self) -> str:
        """The text, possibly empty."""
        return "".join(part["text"] for part in self.parts)


class Choice:
    """Follows a request of the engine and ends it at a stop string.

    Args:
        index: number of the choice in the answer.
        handle: the request.
        tokenizer: the model's tokenizer.
        stop: stop strings.
        skip_special_tokens: whether special tokens have no text.
        hidden: ids of other tokens that have no text.

    Attributes:
        num_tokens: number of tokens up to the end of the text.
        finish_reason: ``"stop"`` or ``"length"``; None before the end.
    """

    def __init__(
        self,
        index: int,
        handle: Handle,
        tokenizer: Any,
        stop: Sequence[str],
        skip_special_tokens: bool,
        hidden: frozenset[int] = frozenset(),
    ):
        self.index, self.handle = index, handle
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._stops = StopStrings(stop)
        self._marks, self._last_drafted = Marks(), False
        self._hidden = hidden
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def read(self, on_tokens: Callable[[Choice, int], object]) -> Piece | None:
        """What has arrived since the last call; None if nothing has.

        Args:
            on_tokens: called with the number of tokens.

        Raises:
            EngineClosedError: the engine was shut down before the end.
            Exception: the exception with which the request failed.
        """
        bursts, ended = self.handle.take()
        if not (bursts or ended):
            return None
        piece, before = Piece(is_last=ended), self.num_tokens
        for burst in bursts:
            self._add(burst, piece)
        if self.num_tokens > before:
            on_tokens(self, self.num_tokens - before)
        if ended:
            self._end(piece)
        return piece

    def _add(self, burst: Burst, piece: Piece) -> None:
        for i, token in enumerate(burst.tokens):
            if self._stops.found is not None:
                return  # the engine has not noticed yet that the request was cancelled
            self.num_tokens += 1
            if burst.logprobs is not None:
                piece.logprobs.append((token, burst.logprobs[i]))
            if token not in self._hidden:
                self._last_drafted = burst.drafted[i]
                self._feed(self._decoder.feed(token), piece)
            if self._stops.found is not None:
                self.handle.cancel()

    def _end(self, piece: Piece) -> None:
        self.handle.check()
        self._feed(self._decoder.flush(), piece)
        self._tell(self._stops.flush(), piece)
        if self._stops.found is None and self.handle.finish_reason == "cancelled":
            raise EngineClosedError("the engine was shut down")
        is_length = self._stops.found is None and self.handle.finish_reason == "length"
        self.finish_reason = "length" if is_length else "stop"

    def _feed(self, text: str, piece: Piece) -> None:
        """Add decoded text, which counts as its last token does; what is certain goes to ``piece``."""
        self._marks.add([Part(text=text, drafted=self._last_drafted)])
        self._tell(self._stops.feed(text), piece)

    def _tell(self, text: str, piece: Piece) -> None:
        for part in self._marks.take(text):
            append(piece.parts, part)


async def followed(
    choices: Sequence[Choice],
    on_tokens: Callable[[Choice, int], object],
    seconds: float,
    timeout: float,
) -> AsyncGenerator[tuple[Choice, Piece], None]:
    """The pieces of all choices, as they arrive.

    Args:
        choices: the choices of a request.
        on_tokens: as in :meth:`Choice.read`.
        seconds: time that is left.
        timeout: the time that the request had, for the message.

    Raises:
        ApiError: time is up.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    is_late = False

    def end() -> None:
        nonlocal is_late
        is_late = True
        ready.set()

    timer = loop.call_later(max(0.0, seconds), end)
    unfinished = [*choices]
    try:
        for choice in choices:
            choice.handle.watch(loop, ready)
        while unfinished:
            await ready.wait()
            ready.clear()
            if is_late:
                raise ApiError(
                    504,
                    f"the request was not complete after {timeout:g} seconds (--request-timeout); ask for "
                    "fewer tokens",
                    code="request_timeout",
                )
            for choice in [*unfinished]:
                if (piece := choice.read(on_tokens)) is not None:
                    if piece.is_last:
                        unfinished.remove(choice)
                    yield choice, piece
    finally:
        timer.cancel()
