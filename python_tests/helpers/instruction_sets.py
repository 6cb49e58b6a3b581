"""Environments of processes that run the CPU ops with another instruction set.

A process chooses its instruction set once, so a comparison needs several processes.
"""

import os
import sys


def environment(isa: str) -> dict[str, str]:
    """The environment of this process and its import path, with the instruction set ``isa``."""
    return {**os.environ, "SPECDEC_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
