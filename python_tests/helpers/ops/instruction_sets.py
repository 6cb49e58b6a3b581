"""Results of the CPU ops with another instruction set.

A process chooses its instruction set once, so a comparison needs several processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_SCRIPT = "import sys, torch; from {} import {}; torch.save({}(), sys.argv[1])"


def results(function: Any, isas: Iterable[str], folder: Path) -> dict[str, Any]:
    """The tensors that a function of a test module returns, by instruction set."""
    name = function.__name__
    script = _SCRIPT.format(function.__module__, name, name)
    path = os.pathsep.join(sys.path)
    processes = {
        isa: subprocess.Popen(
            [sys.executable, "-c", script, folder / isa],
            env={**os.environ, "SPECDEC_CPU_ISA": isa, "PYTHONPATH": path},
        )
        for isa in isas
    }
    assert all(process.wait() == 0 for process in processes.values())
    return {isa: torch.load(folder / isa) for isa in processes}
