"""Metrics for Prometheus, with the names that vLLM gives them, so that its dashboards and tools work.

The counters of speculation and the gauges are read from the engine when they are scraped; the rest is counted
as requests are answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from specdec_ext.engine import AnyEngine, Handle

_LABELS = ("model_name", "engine")
# Seconds. vLLM's buckets begin at 10 ms or later, where accepted drafts would all look alike.
_BUCKETS = [
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
    1280.0,
]  # fmt: skip
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "Time from the arrival of a request to its first token.",
    "vllm:inter_token_latency_seconds": "Time between tokens; that of a burst is divided by its tokens.",
    "vllm:request_time_per_output_token_seconds": "Mean time per token of a request after its first.",
    "vllm:e2e_request_latency_seconds": "Time from the arrival of a request to its end.",
    "vllm:request_queue_time_seconds": "Time that a request waited for its prompt pass.",
    "vllm:request_prefill_time_seconds": "Time from the prompt pass to the first token.",
    "vllm:request_decode_time_seconds": "Time from the first token to the last.",
    "specdec:chunk_gap_seconds": "Time between bursts of tokens: what a reader of the stream sees.",
}
_COUNTERS = {
    "vllm:prompt_tokens": "Number of tokens of prompts.",
    "vllm:generation_tokens": "Number of tokens that were emitted.",
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

    Attributes:
        prompt_tokens: number of tokens of prompts that were read.
        generation_tokens: number of tokens that were emitted.
    """

    def __init__(self, engine: AnyEngine, model_name: str):
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._registry.register(_EngineCollector(engine, self._labels))
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
        self._counts["vllm:generation_tokens"].inc(count)
        if progress.last_burst is None:
            self.prompt_tokens += handle.prompt_tokens
            for name in ("vllm:prompt_tokens", "vllm:prefix_cache_queries"):
                self._counts[name].inc(handle.prompt_tokens)
            self._counts["vllm:prefix_cache_hits"].inc(handle.reused_tokens)
            first = handle.times.first_token or now
            self._observe("vllm:time_to_first_token_seconds", first - handle.times.submitted)
        else:
            gap = now - progress.last_burst
            self._observe("specdec:chunk_gap_seconds", gap)
            for _ in range(count):
                self._observe("vllm:inter_token_latency_seconds", gap / count)
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

    def __init__(self, engine: AnyEngine, labels: tuple[str, str]):
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Any]:
        load, stats = self._engine.load, self._engine.stats()
        used = load.cached_tokens / load.max_tokens if load.max_tokens else 0.0
        for name, text, value in (
            ("num_requests_running", "Number of requests that are being decoded.", load.running),
            ("num_requests_waiting", "Number of requests that wait.", load.waiting),
            ("kv_cache_usage_perc", "Used share of the budget of cached tokens, 0 to 1.", used),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            ("num_drafts", "Number of drafts that were verified.", stats.drafts),
            ("num_draft_tokens", "Number of drafted tokens.", stats.draft_tokens),
            ("num_accepted_tokens", "Number of accepted drafted tokens.", stats.accepted_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of accepted drafted tokens, by their position in the draft, from 0.",
            labels=(*_LABELS, "position"),
        )
        for position, count in enumerate(stats.accepted_per_position):
            by_position.add_metric((*self._labels, str(position)), count)
        yield by_position
