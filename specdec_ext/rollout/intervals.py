"""Measured numbers with 95 % intervals, by a bootstrap over turns and prompts.

Every prompt is asked in every turn, and what is asked in one turn, a *cell*, has in common what the machine
did then and what the prompt is like. So turns and prompts are both resampled with replacement, and a cell
counts as often as its turn was drawn times as often as its prompt was (Owen, The pigeonhole bootstrap, Annals
of Applied Statistics 1, 2007; of groups in general: Davison and Hinkley, Bootstrap Methods and their
Application, 1997, section 3.8). Everything in a cell stays together: its requests and tokens, of candidate
and baseline. So a prompt or a turn that is slow for both does not widen an interval, and the tokens of a
request do not count as independent.

Turns are few, so it matters that means of n out of n vary too little: their variance is (n - 1) / n of the
right one. n - 1 turns are drawn, with which it is right. No interval is wider than the turns that were seen,
and what lasts for longer than all of them is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specdec_ext.evaluate.benchmark import latency
from specdec_ext.evaluate.benchmark.reply import Reply
from specdec_ext.evaluate.benchmark.served import ServedSeries
from specdec_ext.evaluate.speedup import CONFIDENCE, RESAMPLES

FEWEST_PROMPTS = 8  # with fewer, resampled prompts say little about other prompts
# Returns one number per row of weights ``[resamples, cells]``, which count how often a cell was drawn; NaN if
# nothing was. Cell ``turn * prompts + prompt`` is a prompt in a turn.
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
    """Ratio of the means over prompts and turns of tokens per second, as in Spec-Bench (Xia et al. 2024).

    Of the same prompts, means vary together. The medians, which the tables of a benchmark compare, may be
    those of different prompts, so that equal servers would need several times as many prompts to be told so.
    """
    statistic = _ratio(
        *(_rate_of(_sums(each, _tokens_per_second)) for each in (candidate, baseline))
    )
    return _bootstrap(statistic, candidate, baseline)


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
    return _bootstrap(statistic, candidate, baseline)


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
        counts = _sums(series, _drafts)
        if counts[:, 0].sum() < series.total("drafts"):
            return Interval.unknown(f"the {series.name} tells its drafts of all requests only")
        parts.append(_acceptance_of(counts))
    statistic = parts[0] if baseline is None else _ratio(*parts)
    found = _bootstrap(statistic, candidate, baseline)
    if not candidate.total("drafts"):
        return replace(found, note=f"the {candidate.name} has not drafted")
    return found


def _drafts(reply: Reply) -> tuple[float, float]:
    """Drafts, and their accepted tokens."""
    told = reply.stats
    return (0, 0) if told is None else (told.drafts, told.accepted_tokens)


def _tokens_per_second(reply: Reply) -> tuple[float, float]:
    """Tokens per second, and the number of replies: their sums give the mean."""
    return reply.tokens / reply.seconds, 1


def _cells(series: ServedSeries) -> Iterator[tuple[int, Reply]]:
    """The replies, each with the number of its cell."""
    prompts = len(series.replies)
    for prompt, (replies, turns) in enumerate(zip(series.replies, series.turns, strict=True)):
        for reply, turn in zip(replies, turns, strict=True):
            yield turn * prompts + prompt, reply


def _sums(
    series: ServedSeries, values: Callable[[Reply], tuple[float, float]]
) -> NDArray[np.float64]:
    """Two values of each reply, added up by cell: ``[cells, 2]``."""
    found = np.zeros((_turns(series) * len(series.replies), 2))
    for cell, reply in _cells(series):
        found[cell] += values(reply)
    return found


def _turns(*series: ServedSeries) -> int:
    """The number of turns, without last ones in which all requests failed."""
    return 1 + max(turn for each in series for turns in each.turns for turn in turns)


def _bootstrap(
    statistic: Statistic, candidate: ServedSeries, baseline: ServedSeries | None = None
) -> Interval:
    prompts = len(candidate.replies)
    turns = _turns(candidate, *([] if baseline is None else [baseline]))
    value = float(statistic(np.ones((1, turns * prompts), dtype=np.int64))[0])
    if few := _too_few(candidate):
        return Interval.unknown(few, value)
    noise = np.random.default_rng(0)
    of_prompts = noise.multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    # One less than there are: see the beginning of this module.
    of_turns = noise.multinomial(max(1, turns - 1), np.full(turns, 1 / turns), size=RESAMPLES)
    draws = of_turns[:, :, np.newaxis] * of_prompts[:, np.newaxis, :]
    found = statistic(draws.reshape(RESAMPLES, -1))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(found, (tail, 1 - tail))
    return Interval(value, float(low), float(high))


def _too_few(series: ServedSeries) -> str:
    """Why there is no interval; "" if there is one."""
    if len(series.replies) >= FEWEST_PROMPTS:
        return ""
    return f"{len(series.replies)} prompts are too few; an interval needs {FEWEST_PROMPTS}"


def _ratio(ours: Statistic, theirs: Statistic) -> Statistic:
    return lambda weights: ours(weights) / theirs(weights)


def _rate_of(sums: NDArray[np.float64]) -> Statistic:
    """The mean, from ``[cells, 2]`` sums and numbers of values."""

    def statistic(weights: NDArray[np.int64]) -> NDArray[np.float64]:
        total, number = (weights[:, : len(sums)] @ sums).T
        return np.divide(total, number, out=np.full(len(total), np.nan), where=number > 0)

    return statistic


def _acceptance_of(counts: NDArray[np.float64]) -> Statistic:
    """From ``[cells, 2]`` drafts and accepted tokens; 1 without drafts."""

    def statistic(weights: NDArray[np.int64]) -> NDArray[np.float64]:
        drafts, accepted = (weights[:, : len(counts)] @ counts).T
        length: NDArray[np.float64] = 1 + accepted / np.maximum(drafts, 1)
        return length

    return statistic


def _samples(metric: str, series: ServedSeries) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The values of a latency in milliseconds, and the number of the cell that each belongs to."""
    found = [
        (cell, value)
        for cell, reply in _cells(series)
        for value in latency.samples([reply.latency])[metric]
    ]
    cells, values = np.array(found, dtype=float).reshape(-1, 2).T
    return 1e3 * values, cells.astype(np.int64)


def _percentile_of(
    values: NDArray[np.float64], owners: NDArray[np.int64], share: float
) -> Statistic:
    """``numpy.percentile`` of the values of all cells that were drawn, each as often as it was drawn."""
    order = np.argsort(values)
    values, owners = values[order], owners[order]

    def one(weights: NDArray[np.int64]) -> float:
        until = np.cumsum(weights[owners])
        if not until[-1]:
            return float("nan")
        place = (until[-1] - 1) * share
        before = int(place)
        ends = np.searchsorted(until, [before, min(before + 1, until[-1] - 1)], side="right")
        low, high = values[ends]
        return float(low + (place - before) * (high - low))

    return lambda weights: np.array([one(each) for each in weights])
