"""The measuring loop of every benchmark: calls take turns.

Medians of what it measures are compared by :mod:`specdec_ext.evaluate.speedup`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

AT_LEAST = 5  # turns, however long they take

Call = Callable[[], Any]
T = TypeVar("T")


def take_turns(
    calls: Mapping[str, Call],
    turns: int,
    measure: Callable[[str, Call], T],
    *,
    first: int = 0,
    seconds: float = float("inf"),
) -> dict[str, list[T]]:
    """Measure each of ``calls`` once per turn, so that other work on the machine slows all of them alike.

    Args:
        calls: name -> call.
        turns: number of measurements of each call.
        measure: runs the named call and returns its measurement.
        first: index of the call that begins each turn; the others follow in their order.
        seconds: stop when this much time has passed, but not before ``AT_LEAST`` turns.
    """
    names = list(calls)
    names = names[first % len(names) :] + names[: first % len(names)]
    measured: dict[str, list[T]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(turns):
        if turn >= AT_LEAST and time.perf_counter() - began > seconds:
            break
        for name in names:
            measured[name].append(measure(name, calls[name]))
    return measured


def wall_seconds(name: str, call: Call) -> float:
    """Run a call and return its wall time; a ``measure`` of :func:`take_turns`."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
