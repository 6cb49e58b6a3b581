"""Measured numbers with 95 % intervals, by Efron's bootstrap over prompts.

Prompts are resampled with replacement, and everything that belongs to a prompt stays together: all of its
requests and tokens, of the candidate and of the baseline. So a prompt that is slow for both does not widen an
interval, and the tokens of a request do not count as independent. What changes from turn to turn for all
prompts alike, such as other work on the machine, is not in the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specdec_ext.evaluate.benchmark import latency
from specdec_ext.evaluate.benchmark.reply import Reply
from specdec_ext.evaluate.benchmark.served import ServedSeries
from specdec_ext.evaluate.speedup import CONFIDENCE, RESAMPLES, bootstrap

FEWEST_PROMPTS = 8  # with fewer, resampled prompts say little about other prompts
# Returns one number per row of weights ``[resamples, prompts]``, which count how often a prompt was drawn.
Statistic = Callable[[NDArray[np.int64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Interval:
    """A number and the interval in which it lies; NaN with the interval from 0 to infinity if not known.

    Attributes:
        value, low, high: the number and its interval.
        note: why it is not known better; "" for an interval of enough measurements.
    """

    value: float
    low: float
    high: float
    note: str = ""

    @classmethod
    def exact(cls, value: float) -> Interval:
        return cls(value, value, value)

    @classmethod
    def unknown(cls, note: str, value: float = float("nan")) -> Interval:
        return cls(value, 0.0, float("inf"), note)


def speedup(candidate: ServedSeries, baseline: ServedSeries) -> Interval:
    """Ratio of the means over prompts of tokens per second, as in Spec-Bench (Xia et al. 2024).

    Of the same prompts, means vary together. The medians, which the tables of a benchmark compare, may be
    those of different prompts, so that equal servers would need several times as many prompts to be told so.
    """
    found = bootstrap(candidate.tokens_per_second, baseline.tokens_per_second, np.mean)
    if few := _too_few(candidate):
        return Interval.unknown(few, found.value)
    return Interval(found.value, found.low, found.high)


def percentile(
    metric: str, share: int, candidate: ServedSeries, baseline: ServedSeries | None = None
) -> Interval:
    """A percentile of a latency in milliseconds; with a baseline, the ratio to that of the baseline.

    Args:
        metric: a name of ``latency.METRICS``.
        share: the percentile, in percent.
        candidate, baseline: both have answered the same questions.
    """
    parts = []
    for series in (candidate, baseline):
        if series is None:
            continue
        values, owners = _samples(metric, series)
        if not len(values):
            return Interval.unknown(f"the {series.name} does not tell when each token arrived")
        if len(values) * (100 - share) < 100:
            return Interval.unknown(f"p{share} of {len(values)} values is one of the largest")
        parts.append(_percentile_of(values, owners, share / 100))
    statistic = parts[0] if baseline is None else _ratio(*parts)
    return _bootstrap(statistic, candidate)


def acceptance(candidate: ServedSeries, baseline: ServedSeries | None = None) -> Interval:
    """Mean acceptance length, bonus token included; with a baseline, the ratio to that of the baseline.

    It is 1 for a candidate that has not drafted.
    """
    parts = []
    for series in (candidate, baseline):
        if series is None:
            continue
        if not series.speculation_stats:
            return Interval.unknown(f"the {series.name} tells nothing about its drafts")
        if series is baseline and not series.total("drafts"):
            return Interval.unknown(f"the {series.name} has not drafted")
        counts = np.array([_drafts(replies) for replies in series.replies])
        if counts[:, 0].sum() < series.total("drafts"):
            return Interval.unknown(f"the {series.name} tells its drafts of all requests only")
        parts.append(_acceptance_of(counts))
    statistic = parts[0] if baseline is None else _ratio(*parts)
    found = _bootstrap(statistic, candidate)
    if not candidate.total("drafts"):
        return replace(found, note=f"the {candidate.name} has not drafted")
    return found


def _drafts(replies: Sequence[Reply]) -> tuple[int, int]:
    """Drafts of a prompt, and their accepted tokens."""
    told = [reply.stats for reply in replies if reply.stats is not None]
    return sum(each.drafts for each in told), sum(each.accepted_tokens for each in told)


def _bootstrap(statistic: Statistic, candidate: ServedSeries) -> Interval:
    prompts = len(candidate.replies)
    value = float(statistic(np.ones((1, prompts), dtype=np.int64))[0])
    if few := _too_few(candidate):
        return Interval.unknown(few, value)
    draws = np.random.default_rng(0).multinomial(
        prompts, np.full(prompts, 1 / prompts), size=RESAMPLES
    )
    found = statistic(draws)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, (tail, 1 - tail))
    return Interval(value, float(low), float(high))


def _too_few(series: ServedSeries) -> str:
    """Why there is no interval; "" if there is one."""
    if len(series.replies) >= FEWEST_PROMPTS:
        return ""
    return f"{len(series.replies)} prompts are too few; an interval needs {FEWEST_PROMPTS}"


def _ratio(ours: Statistic, theirs: Statistic) -> Statistic:
    return lambda weights: ours(weights) / theirs(weights)


def _acceptance_of(counts: NDArray[np.int64]) -> Statistic:
    """From ``[prompts, 2]`` drafts and accepted tokens."""

    def statistic(weights: NDArray[np.int64]) -> NDArray[np.float64]:
        drafts, accepted = (weights @ counts).T
        length: NDArray[np.float64] = 1 + accepted / np.maximum(drafts, 1)
        return length

    return statistic


def _samples(metric: str, series: ServedSeries) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The values of a latency in milliseconds, and the number of the prompt that each belongs to."""
    by_prompt = [
        latency.samples([reply.latency for reply in replies])[metric] for replies in series.replies
    ]
    owners = np.repeat(np.arange(len(by_prompt)), [len(values) for values in by_prompt])
    return 1e3 * np.concatenate([np.array(values, dtype=float) for values in by_prompt]), owners


def _percentile_of(
    values: NDArray[np.float64], owners: NDArray[np.int64], share: float
) -> Statistic:
    """``numpy.percentile`` of the values of all prompts that were drawn, each as often as it was drawn."""
    order = np.argsort(values)
    values, owners = values[order], owners[order]

    def one(weights: NDArray[np.int64]) -> float:
        until = np.cumsum(weights[owners])
        place = (until[-1] - 1) * share
        before = int(place)
        ends = np.searchsorted(until, [before, min(before + 1, until[-1] - 1)], side="right")
        low, high = values[ends]
        return float(low + (place - before) * (high - low))

    return lambda weights: np.array([one(each) for each in weights])
