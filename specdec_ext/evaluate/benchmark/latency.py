"""Latency of a streamed answer: the time to its first token, and the times between its tokens.

A speculative step emits several tokens, which arrive as one chunk, so "the time between tokens" has three
meanings:

- **TTFT**, time to first token: from the request to the arrival of the first token.
- **TPOT**, time per output token: from the first arrival to the last one, divided by the number of tokens
  minus one. One value per request.
- **ITL**, inter-token latency, amortised: the time before a chunk, divided among its tokens. One value per
  token after the first chunk, so a chunk of three tokens counts three times.
- **Chunk gap**: the time between two arrivals, as a reader of the stream sees it. One value per chunk after
  the first. ``vllm bench serve`` calls this ITL.

Percentiles are over all requests of a contestant: those of TTFT and TPOT are over requests, those of ITL over
tokens, those of chunk gaps over chunks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

# Seconds. Tokens of one step reach a streamer that is told of no steps within microseconds.
SAME_CHUNK = 1e-4
PERCENTILES = (50, 90, 99)
# Metric in records -> name for people.
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "chunk_gap": "chunk gap"}


@dataclass(frozen=True)
class Latency:
    """When the tokens of one request arrived; for a batch, those of one row.

    Attributes:
        first: seconds from the request to the first arrival.
        gaps: seconds between two arrivals.
        counts: tokens of each arrival, the first included; () if only their number in all is known.
        tokens: number of tokens in all.
        prompt_tokens: tokens of the prompts that were read before the first arrival, over all rows.
        rows: rows of the batch, or requests that a server answers at a time.
    """

    first: float
    gaps: tuple[float, ...]
    counts: tuple[int, ...]
    tokens: int
    prompt_tokens: int = 0
    rows: int = 1

    @classmethod
    def of(
        cls,
        began: float,
        arrivals: Sequence[tuple[float, int]],
        prompt_tokens: int = 0,
        rows: int = 1,
    ) -> Latency:
        """The latency of a request that began at a time, from (time, tokens) of each arrival."""
        times, counts = zip(*arrivals, strict=True)
        gaps = tuple(after - before for before, after in pairwise(times))
        return cls(times[0] - began, gaps, counts, sum(counts), prompt_tokens, rows)

    @property
    def per_token(self) -> float | None:
        """TPOT in seconds; None if there is only one token or only one arrival."""
        return sum(self.gaps) / (self.tokens - 1) if self.gaps and self.tokens > 1 else None

    @property
    def between_tokens(self) -> list[float]:
        """ITL in seconds, one value per token after the first arrival; empty without ``counts``."""
        return [
            gap / count
            for gap, count in zip(self.gaps, self.counts[1:], strict=False)
            for _ in range(count)
        ]


class Arrivals:
    """A streamer that records when tokens arrive; time starts when the object is created.

    A generator that calls ``end_step()`` says where a chunk ends. Otherwise, tokens that follow each other
    within ``SAME_CHUNK`` are one chunk.

    Args:
        prompt_tokens: tokens of the prompts, without padding.
    """

    def __init__(self, prompt_tokens: int = 0) -> None:
        self._began = time.perf_counter()
        self._prompt_tokens = prompt_tokens
        self._rows = 0
        self._chunks: list[tuple[float, int]] = []
        self._last = self._began
        self._told_of_steps = self._step_ended = False

    def put(self, tokens: Tensor) -> None:
        now = time.perf_counter()
        if not self._rows:  # the prompt, [rows, length]
            self._rows = len(tokens)
            return
        count = tokens.numel() // self._rows
        if self._continues(now):
            began, before = self._chunks.pop()
            self._chunks.append((began, before + count))
        else:
            self._chunks.append((now, count))
        self._last, self._step_ended = now, False

    def end_step(self) -> None:
        self._told_of_steps = self._step_ended = True

    def end(self) -> None:
        """Do nothing: no token is held back."""

    def latency(self) -> Latency:
        return Latency.of(self._began, self._chunks, self._prompt_tokens, self._rows)

    def _continues(self, now: float) -> bool:
        """Whether a token that arrives now belongs to the last chunk."""
        if not self._chunks:
            return False
        return not self._step_ended if self._told_of_steps else now - self._last <= SAME_CHUNK


def samples(latencies: Sequence[Latency]) -> dict[str, list[float]]:
    """The values of each metric over all requests, in seconds, by the names of ``METRICS``."""
    per_token = [each.per_token for each in latencies]
    return {
        "ttft": [each.first for each in latencies],
        "tpot": [value for value in per_token if value is not None],
        "itl": [value for each in latencies for value in each.between_tokens],
        "chunk_gap": [gap for each in latencies for gap in each.gaps],
    }


def summary(latencies: Sequence[Latency]) -> dict[str, dict[str, float]]:
    """Percentiles in milliseconds, such as ``["itl"]["p99"]``; a metric without any value is missing."""
    return {
        name: {
            f"p{share}": 1e3 * float(value)
            for share, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
        }
        for name, values in samples(latencies).items()
        if values
    }
