"""Other processes that run the CPU ops with another instruction set, which a process chooses once."""

import os
import sys


def environment(isa: str) -> dict[str, str]:
    """This process's environment and its modules, with the instruction set ``isa``."""
    return {**os.environ, "SPECDEC_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
