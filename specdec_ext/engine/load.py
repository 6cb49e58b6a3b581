"""``EngineLoad``: what an engine is doing, and the statistics with which it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec_ext.schedule.settings import resolve_speculation
from specdec_ext.stats import SpeculationStats


@dataclass(frozen=True)
class EngineLoad:
    """What an engine is doing.

    Attributes:
        running: number of requests that have begun and not ended.
        waiting: number of requests that have not begun.
        cached_tokens: number of tokens of the running requests, whose keys and values are kept.
        max_tokens: the budget of tokens of the engine; None without one.
        max_rows: the most requests that run at a time.
    """

    running: int
    waiting: int
    cached_tokens: int
    max_tokens: int | None
    max_rows: int


def first_stats(drafter: Any, speculation: Any) -> SpeculationStats:
    """The statistics of an engine that has done nothing.

    Args:
        drafter: its drafter; a name if no request has shown yet what that is, None for none.
        speculation: its setting.
    """
    if drafter is None or drafter == "none":
        return SpeculationStats()
    settings = resolve_speculation(speculation)
    return SpeculationStats(
        drafter=drafter if isinstance(drafter, str) else type(drafter).__name__,
        policy="fixed" if settings is None or settings.is_fixed else "auto",
    )
