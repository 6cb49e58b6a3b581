"""Pages of metrics as a server writes them, from a few counts."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from specdec_ext.serve import names

_LABELS = ("model_name", "engine")


def page(
    model: str = "m",
    accepted: Sequence[float] = (),
    reached: Sequence[float] = (),
    reference: tuple[Sequence[float], Sequence[float]] | None = None,
    first_token: Sequence[tuple[str, float]] = (),
    running: float = 0,
    **counters: float,
) -> str:
    """A page of metrics.

    Args:
        model: name of the model.
        accepted, reached: counts of positions 1, 2, ...
        reference: (reached, accepted) of a lock.
        first_token: cumulative buckets of the time to the first token.
        running: number of running requests.
        counters: constants of ``names`` in lower case -> count.
    """

    class Families:
        def collect(self):
            for name, value in counters.items():
                yield _filled(
                    CounterMetricFamily(getattr(names, name.upper()), "-", labels=_LABELS), value
                )
            then, now = reference or ((), ())
            for family, name, counts in (
                (CounterMetricFamily, names.ACCEPTED_PER_POSITION, accepted),
                (CounterMetricFamily, names.REACHED_PER_POSITION, reached),
                (GaugeMetricFamily, names.REFERENCE_REACHED, then),
                (GaugeMetricFamily, names.REFERENCE_ACCEPTED, now),
            ):
                if counts:
                    metric = family(name, "-", labels=(*_LABELS, "position"))
                    for position, count in enumerate(counts):
                        metric.add_metric((model, "0", str(position)), count)
                    yield metric
            yield _filled(GaugeMetricFamily(names.RUNNING, "-", labels=_LABELS), running)
            if first_token:
                times = HistogramMetricFamily(names.TIME_TO_FIRST_TOKEN, "-", labels=_LABELS)
                times.add_metric((model, "0"), first_token, sum_value=1.0)
                yield times

    def _filled(family, value):
        family.add_metric((model, "0"), value)
        return family

    registry = CollectorRegistry()
    registry.register(Families())
    return generate_latest(registry).decode()
