"""``machine_line``: the machine and versions of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch


def machine_line(device: torch.device, *more: str) -> str:
    """Processor, threads, torch version, ``more`` and commit, separated by ``|``."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = (
            f"{_processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
        )
    return " | ".join((processor, f"torch {torch.__version__}", *more, f"commit {_commit()}"))


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Short commit hash of the source tree that this package runs from, with a + if files were changed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "none (installed)"
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=root, capture_output=True, text=True
    )
    return described.stdout.strip() or "none"
