"""Speed-ups with a confidence interval over paired measurements, such as prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec_ext.display import Summarised

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Speedup(Summarised):
    """A ratio and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def summary(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"

    def sentences(self) -> Iterable[str]:
        yield (
            f"{self.value:.2f} times as fast. With {CONFIDENCE:.0%} confidence the ratio for such prompts is "
            f"between {self.low:.2f} and {self.high:.2f}."
        )
        if self.low < 1 < self.high:
            yield "The interval contains 1: measure more prompts before you call either of the two faster."


def bootstrap(
    rates: Sequence[float], baseline: Sequence[float], average: Any = np.median, seed: int = 0
) -> Speedup:
    """Ratio of two averages with the percentile interval of Efron's bootstrap over prompts.

    Prompts are resampled with replacement, and the two rates of a prompt stay together, so a prompt that is
    slow for both does not widen the interval. With one prompt the interval has no width.

    Args:
        rates, baseline: tokens per second; entry i of both belongs to prompt i.
        average: ``numpy.median``, or ``numpy.mean`` as in Spec-Bench (Xia et al. 2024).
        seed: seed of the resampling.

    Raises:
        ValueError: if the two are empty or differ in length.
    """
    if len(rates) != len(baseline) or not rates:
        raise ValueError(
            f"expected one rate per prompt from both, got {len(rates)} and {len(baseline)} rates"
        )
    pairs = np.array([rates, baseline])
    chosen = np.random.default_rng(seed).integers(len(rates), size=(RESAMPLES, len(rates)))
    ours, theirs = average(pairs[:, chosen], axis=2)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ours / theirs, (tail, 1 - tail))
    ours, theirs = average(pairs, axis=1)
    return Speedup(float(ours / theirs), float(low), float(high))
