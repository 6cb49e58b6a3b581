"""Metrics for Prometheus, with the names that vLLM gives them, so that its dashboards and tools work.

The counters of speculation and the gauges are read from the engine when they are scraped; the rest is counted
as requests are answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from specdec_ext.engine import AnyEngine, Handle
from specdec_ext.rollout.lock import ReferenceAcceptance
from specdec_ext.serve import names

_LABELS = ("model_name", "engine")
# Seconds. vLLM's buckets begin at 10 ms or later, where accepted drafts would all look alike.
_BUCKETS = [
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
    1280.0,
]  # fmt: skip
_HISTOGRAMS = {
    names.TIME_TO_FIRST_TOKEN: "Time from the arrival of a request to its first token.",
    names.INTER_TOKEN_LATENCY: "Time between tokens; that of a burst is divided by its tokens.",
    "vllm:request_time_per_output_token_seconds": "Mean time per token of a request after its first.",
    "vllm:e2e_request_latency_seconds": "Time from the arrival of a request to its end.",
    "vllm:request_queue_time_seconds": "Time that a request waited for its prompt pass.",
    "vllm:request_prefill_time_seconds": "Time from the prompt pass to the first token.",
    "vllm:request_decode_time_seconds": "Time from the first token to the last.",
    "specdec:chunk_gap_seconds": "Time between bursts of tokens: what a reader of the stream sees.",
}
_COUNTERS = {
    "vllm:prompt_tokens": "Number of tokens of prompts.",
    names.GENERATION_TOKENS: "Number of tokens that were emitted.",
    "vllm:prefix_cache_queries": "Number of tokens of prompts that were looked up among earlier prompts.",
    "vllm:prefix_cache_hits": "Number of those that were not read again.",
}


@dataclass
class Progress:
    """When the last burst of a request arrived; None before the first."""

    last_burst: float | None = None


class ServerMetrics:
    """The metrics of a server.

    Args:
        engine: the engine.
        model_name: name of the model, the value of the label ``model_name``.
        reference: the acceptance of the pair in its lock, which is exported beside that of the requests; None
            without a lock.

    Attributes:
        prompt_tokens: number of tokens of prompts that were read.
        generation_tokens: number of tokens that were emitted.
    """

    def __init__(
        self, engine: AnyEngine, model_name: str, reference: ReferenceAcceptance | None = None
    ):
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._registry.register(_EngineCollector(engine, self._labels, reference))
        self._times = {
            name: Histogram(name, text, _LABELS, buckets=_BUCKETS, registry=self._registry).labels(
                *self._labels
            )
            for name, text in _HISTOGRAMS.items()
        }
        self.prompt_tokens = self.generation_tokens = 0
        self._counts = {
            name: Counter(name, text, _LABELS, registry=self._registry).labels(*self._labels)
            for name, text in _COUNTERS.items()
        }
        self._ended = Counter(
            "vllm:request_success",
            "Number of requests that ended, by the reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )

    def burst(self, handle: Handle, progress: Progress, count: int) -> None:
        """Count a burst of ``count`` tokens that has just arrived."""
        now = time.perf_counter()
        self.generation_tokens += count
        self._counts[names.GENERATION_TOKENS].inc(count)
        if progress.last_burst is None:
            self.prompt_tokens += handle.prompt_tokens
            for name in ("vllm:prompt_tokens", "vllm:prefix_cache_queries"):
                self._counts[name].inc(handle.prompt_tokens)
            self._counts["vllm:prefix_cache_hits"].inc(handle.reused_tokens)
            first = handle.times.first_token or now
            self._observe(names.TIME_TO_FIRST_TOKEN, first - handle.times.submitted)
        else:
            gap = now - progress.last_burst
            self._observe("specdec:chunk_gap_seconds", gap)
            for _ in range(count):
                self._observe(names.INTER_TOKEN_LATENCY, gap / count)
        progress.last_burst = now

    def ended(self, handle: Handle, num_tokens: int, reason: str) -> None:
        """Count a request that has ended: ``"stop"``, ``"length"``, ``"abort"`` or ``"error"``."""
        self._ended.labels(*self._labels, reason).inc()
        times = handle.times
        end = times.finished or time.perf_counter()
        self._observe("vllm:e2e_request_latency_seconds", end - times.submitted)
        if times.started is None:
            return
        self._observe("vllm:request_queue_time_seconds", times.started - times.submitted)
        if times.first_token is None:
            return
        self._observe("vllm:request_prefill_time_seconds", times.first_token - times.started)
        decoding = end - times.first_token
        self._observe("vllm:request_decode_time_seconds", decoding)
        if num_tokens > 1:
            name = "vllm:request_time_per_output_token_seconds"
            self._observe(name, decoding / (num_tokens - 1))

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _observe(self, name: str, seconds: float) -> None:
        self._times[name].observe(max(0.0, seconds))


class _EngineCollector:
    """Reads the engine when the metrics are scraped."""

    def __init__(
        self,
        engine: AnyEngine,
        labels: tuple[str, str],
        reference: ReferenceAcceptance | None,
    ):
        self._engine, self._labels, self._reference = engine, labels, reference

    def collect(self) -> Iterator[Any]:
        load, stats = self._engine.load, self._engine.stats()
        used = load.cached_tokens / load.max_tokens if load.max_tokens else 0.0
        for name, text, value in (
            (names.RUNNING, "Number of requests that are being decoded.", load.running),
            (names.WAITING, "Number of requests that wait.", load.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Used share of the budget of cached tokens, 0 to 1.",
                used,
            ),
        ):
            yield self._filled(GaugeMetricFamily(name, text, labels=_LABELS), value)
        for name, text, count in (
            (names.DRAFTS, "Number of drafts that were verified.", stats.drafts),
            (names.DRAFT_TOKENS, "Number of drafted tokens.", stats.draft_tokens),
            (names.ACCEPTED_TOKENS, "Number of accepted drafted tokens.", stats.accepted_tokens),
            (names.STEPS, "Number of steps of rows, with and without drafts.", stats.steps),
            (names.STEP_TOKENS, "Number of tokens that these emitted.", stats.emitted_tokens),
            (
                names.TIMED_SECONDS,
                "Seconds of the steps that the controller has timed.",
                stats.timed_seconds,
            ),
            (
                names.PLAIN_SECONDS,
                "Estimated seconds of plain decoding for the tokens of these steps.",
                stats.plain_seconds,
            ),
        ):
            yield self._filled(CounterMetricFamily(name, text, labels=_LABELS), count)
        yield self._by_position(
            CounterMetricFamily,
            names.ACCEPTED_PER_POSITION,
            "Number of accepted drafted tokens, by their position in the draft, from 0.",
            stats.accepted_per_position,
        )
        yield self._by_position(
            CounterMetricFamily,
            names.REACHED_PER_POSITION,
            "Number of drafted tokens all of whose predecessors were accepted, by position.",
            stats.reached_per_position,
        )
        if self._reference is not None:
            yield self._by_position(
                GaugeMetricFamily,
                names.REFERENCE_ACCEPTED,
                "The same as for requests, when the pair was measured that the lock names.",
                self._reference.accepted_per_position,
            )
            yield self._by_position(
                GaugeMetricFamily,
                names.REFERENCE_REACHED,
                "The same as for requests, when the pair was measured that the lock names.",
                self._reference.reached,
            )

    def _filled(self, family: Any, value: float) -> Any:
        family.add_metric(self._labels, value)
        return family

    def _by_position(self, family: Any, name: str, text: str, counts: Sequence[int]) -> Any:
        metric = family(name, text, labels=(*_LABELS, names.POSITION))
        for position, count in enumerate(counts):
            metric.add_metric((*self._labels, str(position)), count)
        return metric
