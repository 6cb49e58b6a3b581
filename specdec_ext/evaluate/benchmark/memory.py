"""Peak memory of a call."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): sets the peak to the current resident size


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the current memory; no effect where :func:`peak_bytes` returns None."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (_PROCESS / "clear_refs").exists():
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int | None:
    """Peak bytes since :func:`reset_peak`.

    On a GPU: bytes of its tensors. On the CPU: resident bytes of this process (VmHWM), models included; None
    if /proc does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = (_PROCESS / "status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) << 10 if found else None
