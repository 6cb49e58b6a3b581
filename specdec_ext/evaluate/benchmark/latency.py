"""Latency: time to the first token, time per further token, and the gaps that a reader of a stream sees.

A speculative step emits several tokens at once, so the last two differ. The time per token is the mean over
all tokens after the first. A gap is the time between two arrivals, each of one or more tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

# Seconds. The tokens of one step reach the streamer one after the other, within microseconds.
SAME_CHUNK = 1e-4
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Latency:
    """Latency of one call, in seconds.

    Attributes:
        first: time from the call to the first token.
        per_token: mean time per token after the first; 0 if there is only one.
        gaps: times between two arrivals.
    """

    first: float
    per_token: float
    gaps: tuple[float, ...]


class Arrivals:
    """A streamer that records when tokens arrive; time starts when the object is created."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._rows = 0
        self._tokens = 0
        self._chunks: list[float] = []
        self._last = self._began

    def put(self, tokens: Tensor) -> None:
        now = time.perf_counter()
        if not self._rows:  # the prompt, [rows, length]
            self._rows = len(tokens)
            return
        if not self._chunks or now - self._last > SAME_CHUNK:
            self._chunks.append(now)
        self._last = now
        self._tokens += tokens.numel() // self._rows

    def end(self) -> None:
        """Do nothing: no token is held back."""

    def latency(self) -> Latency:
        first, last = self._chunks[0], self._last
        return Latency(
            first - self._began,
            (last - first) / max(1, self._tokens - 1),
            tuple(
                after - before
                for before, after in zip(self._chunks, self._chunks[1:], strict=False)
            ),
        )


def summary(latencies: Sequence[Latency]) -> dict[str, float]:
    """Milliseconds: medians over the calls, percentiles over the gaps of all calls; empty without calls."""
    if not latencies:
        return {}
    gaps = [gap for each in latencies for gap in each.gaps] or [0.0]
    shares = np.percentile(gaps, PERCENTILES)
    return {
        "first_token": 1e3 * float(np.median([each.first for each in latencies])),
        "per_token": 1e3 * float(np.median([each.per_token for each in latencies])),
        **{
            f"chunk_gap_p{share}": 1e3 * float(gap)
            for share, gap in zip(PERCENTILES, shares, strict=True)
        },
    }
