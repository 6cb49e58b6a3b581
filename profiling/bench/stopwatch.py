"""Times of single calls with cold caches, and the device's bandwidth for comparison.

Before every timed call a buffer several times as large as the last-level cache is read, so that the call's
inputs come from memory. Reading leaves no dirty lines whose write-back would slow the call. On the CPU the
flush also evicts the code of Python and the op, so the same code then runs once on small inputs ("primers").
Calls take turns (:func:`specdec_ext.evaluate.measuring.take_turns`). On a GPU, times are measured between
CUDA events.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec_ext.evaluate.measuring import Call, take_turns, wall_seconds

CACHES = 4  # size of the flush buffer, in last-level caches
LARGE = {"cpu": 256 << 20, "cuda": 1 << 30}  # bytes of the buffers that measure bandwidth
WARM_UPS = 3  # calls of each contestant before the first timed one


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

    def reader(self, size: int) -> Call:
        """A call that reads ``size`` bytes; its time is the best possible for an op that reads as much."""
        source = torch.ones(max(1, size // 4), device=self.device)
        result = torch.empty((), device=self.device)
        return lambda: torch.amax(source, dim=0, out=result)

    def time(
        self,
        calls: Mapping[str, Call],
        repeats: int,
        *,
        primers: Mapping[str, Call] | None = None,
        warm: bool = False,
        seconds: float = float("inf"),
    ) -> dict[str, list[float]]:
        """Microseconds of calls that take turns, after ``WARM_UPS`` calls of each.

        Args:
            calls: name -> call.
            repeats: timed calls of each, at least 5.
            primers: for each call, its code on small inputs, run after the caches are flushed.
            warm: do not flush the caches.
            seconds: stop when this much time has passed, but not before 5 turns.
        """
        for call in calls.values():
            for _ in range(WARM_UPS):
                call()
        on_gpu = self.device.type == "cuda"

        def measure(name: str, call: Call) -> Any:
            if not warm:
                self.cool()
            if primers:
                primers[name]()
            return _events(call) if on_gpu else 1e6 * wall_seconds(name, call)

        times = take_turns(calls, repeats, measure, seconds=seconds)
        if on_gpu:
            torch.cuda.synchronize(self.device)
            times = {
                name: [1e3 * start.elapsed_time(end) for start, end in pairs]
                for name, pairs in times.items()
            }
        return times

    def bandwidth(self) -> dict[str, float]:
        """``copy_gb_per_s``, which counts bytes read plus bytes written, and ``read_gb_per_s``.

        Best bandwidth of 20 calls on large buffers; for reading, of two kinds of reduction.
        """
        size = LARGE[self.device.type]
        source = torch.ones(size // 4, device=self.device)
        target, scalar = torch.empty_like(source), torch.empty((), device=self.device)
        calls: dict[str, Call] = {
            "copy": lambda: target.copy_(source),
            "sum": lambda: torch.sum(source, dim=0, out=scalar),
            "max": lambda: torch.amax(source, dim=0, out=scalar),
        }
        times = self.time(calls, 20, warm=True)
        rate = {name: size / min(each) / 1e3 for name, each in times.items()}
        return {"copy_gb_per_s": 2 * rate["copy"], "read_gb_per_s": max(rate["sum"], rate["max"])}


def _events(call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Record events around a call; the host does not wait and queues it while the device flushes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    return start, end


def last_level_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes, default=32 << 20)
