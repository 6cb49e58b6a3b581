"""How much memory a call had at most."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): the peak becomes what is resident now


def reset_peak(device: torch.device) -> None:
    """Begin to look for a new peak; without effect where :func:`peak_bytes` is None."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (_PROCESS / "clear_refs").exists():
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes since :func:`reset_peak`: of tensors on a GPU, else resident in this process, models
    included (VmHWM); None where Linux does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = (_PROCESS / "status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) << 10 if found else None
