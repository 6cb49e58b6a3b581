"""``EngineLoad``: what an engine is doing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLoad:
    """What an engine is doing.

    Attributes:
        running: number of requests that have begun and not ended.
        waiting: number of requests that have not begun.
        cached_tokens: number of tokens of the running requests, whose keys and values are kept.
        max_tokens: the budget of tokens of the engine; None without one.
    """

    running: int
    waiting: int
    cached_tokens: int
    max_tokens: int | None
