"""Times of single calls with cold caches, and the device's bandwidth for comparison.

Before every timed call a buffer several times as large as the last-level cache is read, so that the call's
inputs come from memory. Reading leaves no dirty lines whose write-back would slow the call. On the CPU the
flush also evicts the code of Python and the op, so the same code then runs once on small inputs ("primers").
Contestants alternate call by call, so that other work on the machine affects all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]
CACHES = 4  # size of the flush buffer, in last-level caches
LARGE = 256 << 20  # bytes of the buffers that measure bandwidth


@dataclass(frozen=True)
class Times:
    """Microseconds of each call."""

    calls: list[float]

    def quantile(self, share: float) -> float:
        return sorted(self.calls)[round(share * (len(self.calls) - 1))]

    @property
    def median(self) -> float:
        return statistics.median(self.calls)


@dataclass(frozen=True)
class Bandwidth:
    """GB/s of the device: ``copy`` counts bytes read plus bytes written, ``read`` bytes read."""

    copy: float
    read: float

    def best(self, other: Bandwidth) -> Bandwidth:
        return Bandwidth(max(self.copy, other.copy), max(self.read, other.read))


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._buffer = torch.ones(
            CACHES * last_level_cache_bytes(device), dtype=torch.uint8, device=device
        ).view(torch.float32)
        self._sum = torch.empty((), device=device)

    def cool(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sum)

    def reader(self, size: int) -> Run:
        """A call that reads ``size`` bytes; its time is the best possible for an op that reads as much."""
        source = torch.ones(max(1, size // 4), device=self.device)
        result = torch.empty((), device=self.device)
        return lambda: torch.amax(source, dim=0, out=result)

    def time(
        self,
        contestants: Mapping[str, Run],
        repeats: int,
        *,
        primers: Mapping[str, Run] | None = None,
        warm: bool = False,
        seconds: float = float("inf"),
    ) -> dict[str, Times]:
        """Times of alternating calls, after three warm-up calls of each contestant.

        Args:
            contestants: name -> call.
            repeats: calls of each contestant, at least 5.
            primers: for each contestant, its code on small inputs, run after the caches are flushed.
            warm: do not flush the caches.
            seconds: stop when this much time has passed, but not before 5 calls of each contestant.
        """
        for run in contestants.values():
            for _ in range(3):
                run()
        measure = self._events if self.device.type == "cuda" else self._clock
        times: dict[str, list[Any]] = {name: [] for name in contestants}
        began = time.perf_counter()
        for repeat in range(repeats):
            if repeat >= 5 and time.perf_counter() - began > seconds:
                break
            for name, run in contestants.items():
                if not warm:
                    self.cool()
                if primers:
                    primers[name]()
                times[name].append(measure(run))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            times = {
                name: [1e3 * start.elapsed_time(end) for start, end in pairs]
                for name, pairs in times.items()
            }
        return {name: Times(calls) for name, calls in times.items()}

    def _clock(self, run: Run) -> float:
        began = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - began) / 1e3

    def _events(self, run: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Record events around the call; the host does not wait and queues it while the device flushes."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        return start, end

    def bandwidth(self) -> Bandwidth:
        """Best bandwidth of 20 calls on buffers of 256 MiB; for reading, of two kinds of reduction."""
        source = torch.ones(LARGE // 4, device=self.device)
        target, scalar = torch.empty_like(source), torch.empty((), device=self.device)
        runs: dict[str, Run] = {
            "copy": lambda: target.copy_(source),
            "sum": lambda: torch.sum(source, dim=0, out=scalar),
            "max": lambda: torch.amax(source, dim=0, out=scalar),
        }
        times = self.time(runs, 20, warm=True)
        rate = {name: LARGE / min(each.calls) / 1e3 for name, each in times.items()}
        copy = 2 * rate.pop("copy")
        return Bandwidth(copy=copy, read=max(rate.values()))


def last_level_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes, default=32 << 20)
