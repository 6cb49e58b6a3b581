"""``simulate``: requests of a server that speculates, step by step, to see the tail of their latency.

Means follow from costs and acceptance alone; percentiles do not. Every row of a batch waits for the whole
step, so a token whose draft was rejected takes a draft and a wider pass.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from specdec_ext.display import Summarised, Table
from specdec_ext.display.text import counted
from specdec_ext.planning.costs import SECONDS, StepCosts
from specdec_ext.planning.traffic import TextKind, Traffic

PERCENTILES = (50, 90, 99)
REQUESTS_PER_ROW = 32


@dataclass(frozen=True)
class Tail:
    """Latency of all requests, in the unit of the costs.

    Attributes:
        per_token: time per token after the first, the mean over requests.
        itl: amortised inter-token latency at ``PERCENTILES``: the time of a step is divided among the tokens
            that it emits for a row.
        itl_mean: its mean over tokens.
        chunk_gap: time between two arrivals at ``PERCENTILES``, as a reader of a stream sees it.
    """

    per_token: float
    itl: tuple[float, ...]
    itl_mean: float
    chunk_gap: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Simulation(Summarised):
    """The result of :func:`simulate`.

    Attributes:
        rows: most rows of a batch.
        length: draft length.
        unit: unit of all times.
        steps: number of active rows -> number of steps, that is, of passes of the target.
        tokens: tokens that the steps emitted.
        alone: share of these tokens that their step emitted alone, because the first draft token was wrong.
        ratio: time of a step with all rows, in plain steps.
        tail: latency with drafts.
        plain: latency of plain decoding of the same requests.
    """

    rows: int
    length: int
    unit: str
    steps: dict[int, int]
    tokens: int
    alone: float
    ratio: float
    tail: Tail
    plain: Tail

    @property
    def num_steps(self) -> int:
        """Number of passes of the target after the prompts."""
        return sum(self.steps.values())

    @property
    def mean_falls_and_tail_rises(self) -> bool:
        """Whether speculation shortens the mean inter-token latency and lengthens its 99th percentile."""
        return self.tail.itl_mean < self.plain.itl_mean and self.tail.itl[-1] > self.plain.itl[-1]

    def summary(self) -> str:
        ratios = self.plain.itl_mean / self.tail.itl_mean, self.tail.itl[-1] / self.plain.itl[-1]
        return (
            f"drafts of {self.length}, {counted(self.rows, 'row')}: {ratios[0]:.2f}x the tokens per second "
            f"of plain decoding, p99 of the inter-token latency {ratios[1]:.2f}x that of plain decoding"
        )

    def sentences(self) -> Iterable[str]:
        yield f"{self.summary()}."
        if self.mean_falls_and_tail_rises:
            yield (
                f"The mean falls and the tail rises: {self.alone:.1%} of the tokens come alone, from steps "
                "whose first draft token was wrong. Such a token waits for a draft and for a wider pass, "
                f"{self.ratio:.2f} plain steps together. It does not wait for a second pass of the target: "
                "the pass that rejects a draft yields the right token. Shorter drafts, a cheaper drafter or "
                "fewer rows shorten the tail."
            )
        else:
            yield (
                "A token whose draft was rejected waits for a draft and for a wider pass, "
                f"{self.ratio:.2f} plain steps together, and not for a second pass of the target."
            )

    def tables(self) -> Iterable[Table]:
        scale = 1e3 if self.unit == SECONDS else 1.0
        names = [f"p{share}" for share in PERCENTILES]
        rows = []
        for name, tail in (("plain", self.plain), ("drafts", self.tail)):
            for what, mean, values in (
                ("inter-token latency, amortised", tail.itl_mean, tail.itl),
                ("chunk gap", None, tail.chunk_gap),
            ):
                shown = ["" if mean is None else f"{scale * mean:.3f}"]
                rows.append((name, what, *shown, *(f"{scale * each:.3f}" for each in values)))
        unit = "ms" if self.unit == SECONDS else self.unit
        title = f"latency in {unit}, {counted(self.rows, 'row')}, drafts of {self.length}"
        yield Table(rows, ("", "", "mean", *names), title)

    def record(self) -> dict[str, Any]:
        """The simulation, for JSON."""
        return {
            **{name: vars(self)[name] for name in ("rows", "length", "unit", "steps", "tokens")},
            "alone": self.alone,
            "ratio": self.ratio,
            "percentiles": PERCENTILES,
            "tail": vars(self.tail),
            "plain": vars(self.plain),
        }


@dataclass
class _Request:
    """A request that is decoded.

    Attributes:
        kind: its kind of text.
        left: tokens that it will still get.
        gaps: for each of its steps, (time, emitted tokens).
    """

    kind: TextKind
    left: int
    gaps: list[tuple[float, int]] = field(default_factory=list)


def simulate(
    costs: StepCosts,
    traffic: Traffic,
    length: int,
    rows: int = 1,
    *,
    new_tokens: int = 256,
    requests: int | None = None,
    seed: int = 0,
) -> Simulation:
    """Simulate requests of equal length that a batch decodes with drafts of a fixed length.

    At most ``rows`` requests are decoded together; when one ends, the next takes its place. The time of
    prompts is left out, because drafts do not change it: a request has its first token when it begins.

    Args:
        costs: time of steps.
        traffic: kinds of text. Each request has one kind; they come in random order.
        length: draft length; the last drafts of a request are as long as tokens are left.
        rows: most rows of the batch.
        new_tokens: tokens of each request.
        requests: number of requests; None for ``REQUESTS_PER_ROW`` per row. With as many requests as rows,
            this is one call of :func:`specdec_ext.generate`.
        seed: seed of the draws.

    Raises:
        ValueError: for a number that is too small.
    """
    requests = rows * REQUESTS_PER_ROW if requests is None else requests
    if length < 1 or rows < 1 or requests < 1 or new_tokens < 2:
        raise ValueError(
            f"length={length}, rows={rows}, requests={requests}, new_tokens={new_tokens}; expected at least "
            "1, 1, 1 and 2"
        )
    draws = random.Random(seed)
    ends = list(accumulate(kind.share for kind in traffic.kinds))
    quantiles = [(each + 0.5) / requests * ends[-1] for each in range(requests)]
    kinds = [traffic.kinds[bisect_right(ends, each)] for each in quantiles]
    draws.shuffle(kinds)

    def run(draft: int) -> tuple[list[_Request], Counter[int]]:
        waiting = deque(_Request(kind, new_tokens - 1) for kind in kinds)
        active: list[_Request] = []
        ended: list[_Request] = []
        steps: Counter[int] = Counter()
        while waiting or active:
            while waiting and len(active) < rows:
                active.append(waiting.popleft())
            steps[len(active)] += 1
            time = costs.step(len(active), draft)
            for each in active:
                emitted = 1 + _accepted(each.kind, min(draft, each.left - 1), draws)
                each.left -= emitted
                each.gaps.append((time, emitted))
            ended += [each for each in active if not each.left]
            active = [each for each in active if each.left]
        return ended, steps

    (plain, _), (drafted, steps) = run(0), run(length)
    emitted = [count for each in drafted for _, count in each.gaps]
    return Simulation(
        rows,
        length,
        costs.unit,
        dict(sorted(steps.items())),
        sum(emitted),
        emitted.count(1) / sum(emitted),
        costs.ratio(rows, length),
        _tail(drafted),
        _tail(plain),
    )


def _accepted(kind: TextKind, length: int, draws: random.Random) -> int:
    """Draw how many tokens of a draft are accepted."""
    for position in range(length):
        rate = kind.acceptance[min(position, len(kind.acceptance) - 1)]
        if draws.random() >= rate:
            return position
    return length


def _tail(requests: Sequence[_Request]) -> Tail:
    gaps = np.array([gap for each in requests for gap in each.gaps])
    times, emitted = gaps[:, 0], gaps[:, 1].astype(int)
    itl = np.repeat(times / emitted, emitted)
    means = [
        sum(time for time, _ in each.gaps) / sum(count for _, count in each.gaps)
        for each in requests
    ]

    def shares(values: Any) -> tuple[float, ...]:
        return tuple(float(value) for value in np.percentile(values, PERCENTILES))

    return Tail(float(np.mean(means)), shares(itl), float(itl.mean()), shares(times))
