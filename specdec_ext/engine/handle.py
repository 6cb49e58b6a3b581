"""``Handle``: one request of an engine, as the thread that submitted it sees it.

The engine's thread adds a burst of tokens after each step. Any thread, or an asyncio task, reads the bursts,
waits for the end or cancels the request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import Literal

from specdec_ext.stats import SpeculationStats

# Why a request ended: an end-of-sequence id, a stop string or another stopping criterion; its length limit;
# Handle.cancel; an exception.
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at one emitted token, from the model's logits before temperature and processors.

    Attributes:
        logprob: of the emitted token.
        top: the most probable tokens with their log probabilities, in descending order; as many as the
            request asked for.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Burst:
    """The tokens that one step emitted to a request.

    Attributes:
        tokens: ids, at least one.
        drafted: which of them are accepted drafts.
        logprobs: for each token; None if the request did not ask for them.
    """

    tokens: list[int]
    drafted: list[bool]
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class Times:
    """When a request passed from one phase to the next, in seconds of ``time.perf_counter``.

    Attributes:
        submitted: it was accepted by :meth:`Engine.submit`.
        started: its prompt pass began; None while it waits.
        first_token: its first token was emitted.
        finished: it ended.
    """

    submitted: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False)
class Handle:
    """A request that an engine has accepted.

    Iterate over it, with ``for`` or ``async for``, to read its bursts; only one reader gets each burst. The
    iteration ends with the request. If the request failed, it raises the exception.

    Attributes:
        prompt_tokens: number of tokens of the prompt.
        reused_tokens: those of them that were not read, because an earlier prompt began with them.
        times: when the request passed from one phase to the next.
        stats: the statistics of the request, complete when it has ended.
        finish_reason: why the request has ended; None before that.
        tokens: all ids emitted so far.
    """

    prompt_tokens: int
    times: Times
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: FinishReason | None = None
    tokens: list[int] = field(default_factory=list)
    reused_tokens: int = 0
    _bursts: deque[Burst] = field(default_factory=deque)
    _changed: Condition = field(default_factory=Condition)
    _error: BaseException | None = None
    _wake: Callable[[], object] | None = None  # wakes the asyncio task that reads the bursts
    _is_woken: bool = False  # since its last reading
    _cancelled: bool = False

    def cancel(self) -> None:
        """Ask the engine to end the request; it ends before the next step. No effect after its end."""
        self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._cancelled

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for the end of the request and return all of its ids.

        Args:
            timeout: the longest time to wait, in seconds; None waits without a limit.

        Raises:
            TimeoutError: the request has not ended in time. It goes on.
            Exception: the exception with which the request failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.finish_reason is not None, timeout):
                raise TimeoutError(f"the request has not ended within {timeout} seconds")
        self.check()
        return self.tokens

    def __iter__(self) -> Iterator[Burst]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._bursts or self.finish_reason is not None)
            bursts, ended = self.take()
            yield from bursts
            if ended:
                return self.check()

    async def __aiter__(self) -> AsyncIterator[Burst]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        self.watch(loop, ready)
        while True:
            await ready.wait()
            ready.clear()
            bursts, ended = self.take()
            for burst in bursts:
                yield burst
            if ended:
                self.check()
                return

    def watch(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
        """Set an event of a loop whenever there is something to :meth:`take`, or the request has ended."""

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed before the request had ended
                loop.call_soon_threadsafe(ready.set)

        with self._changed:
            self._wake = wake
            self._is_woken = True
        ready.set()

    def take(self) -> tuple[list[Burst], bool]:
        """The bursts since the last call, and whether the request has ended, so that these are the last."""
        with self._changed:
            self._is_woken = False
            bursts = [*self._bursts]
            self._bursts.clear()
            return bursts, self.finish_reason is not None

    def check(self) -> None:
        """Raise the exception with which the request failed, if it did."""
        if self._error is not None:
            raise self._error

    # --- called by the engine's thread

    def emit(self, burst: Burst) -> None:
        """Add a burst."""
        if self.times.first_token is None:
            self.times.first_token = time.perf_counter()
        with self._changed:
            self.tokens += burst.tokens
            self._bursts.append(burst)
            self._notify()

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End the request."""
        self.times.finished = time.perf_counter()
        with self._changed:
            self.finish_reason, self._error = reason, error
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        # A reader that has not come yet needs no second call, which would cost a system call.
        if self._wake is not None and not self._is_woken:
            self._is_woken = True
            self._wake()
