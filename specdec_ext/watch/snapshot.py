"""``Snapshot``: the numbers on a page of metrics that are watched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec_ext.display.text import one_line
from specdec_ext.preflight.extras import require
from specdec_ext.serve import names
from specdec_ext.tree.config import MAX_NODES

COUNTERS = (
    *(names.DRAFTS, names.DRAFT_TOKENS, names.ACCEPTED_TOKENS, names.GENERATION_TOKENS),
    *(names.STEPS, names.STEP_TOKENS, names.TIMED_SECONDS, names.PLAIN_SECONDS),
)
POSITION_COUNTERS = (names.ACCEPTED_PER_POSITION, names.REACHED_PER_POSITION)
REFERENCE = (names.REFERENCE_ACCEPTED, names.REFERENCE_REACHED)
GAUGES = (names.RUNNING, names.WAITING)
HISTOGRAMS = (names.TIME_TO_FIRST_TOKEN, names.INTER_TOKEN_LATENCY)
# The time at which a counter began to count, which Python's client exports for each of its own.
_BEGAN = f"{names.GENERATION_TOKENS}_created"


@dataclass(frozen=True)
class Snapshot:
    """What a server had counted at one time, over all of its engines.

    Attributes:
        at: seconds, on a clock that does not go back.
        model: name of the model.
        counters: name -> count; only those that the server has.
        positions: name of a counter or a reference by position -> counts of positions 1, 2, ...
        gauges: name -> value.
        histograms: name -> {upper bound: number of values up to it}.
        began: when the server began to count, in seconds of its own clock; None if it does not say.
    """

    at: float
    model: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    positions: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    began: float | None = None

    def follows(self, earlier: Snapshot) -> bool:
        """Whether the server has counted on since ``earlier``: it has not been started again."""
        if None not in (self.began, earlier.began) and self.began != earlier.began:
            return False
        return (
            all(self.counters.get(name, 0) >= count for name, count in earlier.counters.items())
            and all(
                at(self.positions.get(name, ()), i) >= count
                for name in POSITION_COUNTERS
                for i, count in enumerate(earlier.positions.get(name, ()))
            )
            and all(
                self.histograms.get(name, {}).get(bound, 0) >= count
                for name, counts in earlier.histograms.items()
                for bound, count in counts.items()
            )
        )


def read(page: str, at: float, model: str | None = None) -> Snapshot:
    """Read a page of metrics in Prometheus' text format; it is not trusted.

    Args:
        page: the text.
        at: when it was fetched, in seconds.
        model: name of the model whose metrics are read; None for the only one on the page.

    Raises:
        ValueError: if it is no such page, or has none of the metrics that are watched, or not of this model.
        ImportError: if prometheus_client is not installed.
    """
    parser = require("prometheus_client.parser", "specdec watch")
    try:
        samples = [
            sample
            for family in parser.text_string_to_metric_families(page)
            for sample in family.samples
        ]
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"this is no page of metrics: {one_line(str(error))[:200]}") from error
    watched = [sample for sample in samples if _stem(sample.name) is not None]
    if not watched:
        raise ValueError(
            f"none of its {len(samples)} metrics is one of speculation, such as {names.DRAFTS}_total; "
            "expected the metrics of specdec serve or vLLM"
        )
    found = dict.fromkeys(sample.labels.get("model_name", "") for sample in watched)
    if model is None:
        if len(found) > 1:
            raise ValueError(f"it serves {', '.join(map(one_line, found))}; pass one as --model")
        (model,) = found
    elif model not in found:
        raise ValueError(f"it serves {', '.join(map(one_line, found))}, not {model}")
    return _summed(
        [each for each in watched if each.labels.get("model_name", "") == model], at, model
    )


def _stem(name: str) -> str | None:
    """The name in this module of the metric that a sample belongs to; None if it is not watched."""
    if name in GAUGES or name in REFERENCE or name == _BEGAN:
        return name
    stem, _, suffix = name.rpartition("_")
    kinds = {"total": (*COUNTERS, *POSITION_COUNTERS), "bucket": HISTOGRAMS}
    return stem if stem in kinds.get(suffix, ()) else None


def _summed(samples: list[Any], at: float, model: str) -> Snapshot:
    """Add the samples of several engines.

    Raises:
        ValueError: for a value or a label that such a metric can't have.
    """
    numbers: dict[str, float] = {}
    by_position: dict[str, dict[int, float]] = {}
    histograms: dict[str, dict[float, float]] = {}
    for sample in samples:
        name, value = _stem(sample.name) or "", float(sample.value)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{sample.name} is {value}; expected a number from 0 on")
        if name in HISTOGRAMS:
            counts, key = histograms.setdefault(name, {}), _bound(sample)
            counts[key] = counts.get(key, 0) + value
        elif name in POSITION_COUNTERS or name in REFERENCE:
            values, position = by_position.setdefault(name, {}), _position(sample)
            values[position] = values.get(position, 0) + value
        elif name == _BEGAN:
            numbers[name] = max(value, numbers.get(name, 0))
        else:
            numbers[name] = numbers.get(name, 0) + value
    return Snapshot(
        at,
        model,
        {name: numbers[name] for name in COUNTERS if name in numbers},
        {
            name: tuple(values.get(each, 0) for each in range(max(values) + 1))
            for name, values in by_position.items()
        },
        {name: numbers[name] for name in GAUGES if name in numbers},
        {name: dict(sorted(counts.items())) for name, counts in histograms.items()},
        numbers.get(_BEGAN),
    )


def _position(sample: Any) -> int:
    text = sample.labels.get(names.POSITION, "")
    if not (text.isascii() and text.isdecimal() and int(text) < MAX_NODES):
        raise ValueError(f"{sample.name} has position {one_line(text)!r}; expected 0, 1, 2, ...")
    return int(text)


def _bound(sample: Any) -> float:
    text = sample.labels.get("le", "")
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise ValueError(f"{sample.name} has the bound {one_line(text)!r}; expected a number")
    return bound


def at(counts: tuple[float, ...], position: int) -> float:
    """The count of a position, from 0; 0 for positions that were never reached."""
    return counts[position] if position < len(counts) else 0.0
