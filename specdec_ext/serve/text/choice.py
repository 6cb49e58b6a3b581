"""``Choice``: one text of a request as it grows, and the choices of a request together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_ext.display.detokenize import IncrementalDecoder
from specdec_ext.engine import Handle, TokenLogprobs
from specdec_ext.errors import EngineClosedError
from specdec_ext.serve.http.errors import ApiError
from specdec_ext.serve.text.marks import Marks, Part, append
from specdec_ext.serve.text.stops import StopStrings


@dataclass
class Piece:
    """What a choice gains with one burst of the engine.

    Attributes:
        parts: the parts of the text that is certain; neighbours differ in ``drafted``.
        logprobs: (id, log probabilities) of the tokens of the burst; empty if they were not requested.
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

    async def pieces(
        self, on_burst: Callable[[Choice, int], object]
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of the text; the last one comes after the end of the engine's request.

        Args:
            on_burst: called with the number of tokens of each burst, as soon as it arrives.

        Raises:
            EngineClosedError: the engine was shut down before the end.
            Exception: the exception with which the request failed.
        """
        async for burst in self.handle:
            if self._stops.found is not None:
                continue  # the engine has not noticed yet that the request was cancelled
            piece, count = Piece(), 0
            for i, token in enumerate(burst.tokens):
                count += 1
                if burst.logprobs is not None:
                    piece.logprobs.append((token, burst.logprobs[i]))
                if token not in self._hidden:
                    self._last_drafted = burst.drafted[i]
                    self._feed(self._decoder.feed(token), piece)
                if self._stops.found is not None:
                    self.handle.cancel()
                    break
            self.num_tokens += count
            on_burst(self, count)
            yield piece
        last = Piece(is_last=True)
        self._feed(self._decoder.flush(), last)
        self._tell(self._stops.flush(), last)
        if self._stops.found is None and self.handle.finish_reason == "cancelled":
            raise EngineClosedError("the engine was shut down")
        is_length = self._stops.found is None and self.handle.finish_reason == "length"
        self.finish_reason = "length" if is_length else "stop"
        yield last

    def _feed(self, text: str, piece: Piece) -> None:
        """Add decoded text, which counts as its last token does; what is certain goes to ``piece``."""
        self._marks.add([Part(text=text, drafted=self._last_drafted)])
        self._tell(self._stops.feed(text), piece)

    def _tell(self, text: str, piece: Piece) -> None:
        for part in self._marks.take(text):
            append(piece.parts, part)


async def followed(
    choices: Sequence[Choice],
    on_burst: Callable[[Choice, int], object],
    deadline: float,
    timeout: float,
) -> AsyncGenerator[tuple[Choice, Piece], None]:
    """The pieces of all choices, in the order in which they arrive.

    Args:
        choices: the choices of a request.
        on_burst: as in :meth:`Choice.pieces`.
        deadline: time of ``time.perf_counter`` at which time is up.
        timeout: the time that the request had, for the message.

    Raises:
        ApiError: time is up.
    """
    arrived: asyncio.Queue[tuple[Choice, Piece] | BaseException] = asyncio.Queue()

    async def follow(choice: Choice) -> None:
        try:
            async for piece in choice.pieces(on_burst):
                arrived.put_nowait((choice, piece))
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.ensure_future(follow(choice)) for choice in choices]
    try:
        unfinished = len(choices)
        while unfinished:
            item = await asyncio.wait_for(arrived.get(), max(0.0, deadline - time.perf_counter()))
            if isinstance(item, BaseException):
                raise item
            unfinished -= item[1].is_last
            yield item
    except asyncio.TimeoutError as error:
        raise ApiError(
            504,
            f"the request was not complete after {timeout:g} seconds (--request-timeout); ask for fewer "
            "tokens",
            code="request_timeout",
        ) from error
    finally:
        for task in tasks:
            task.cancel()
