"""One program in a process of its own, which answers commands in lines of JSON.

``python -m peers.worker MODULE CLASS`` runs a :class:`~peers.programs.Program`:

- ``{"do": "export", "model", "out", "format"}``: :meth:`Program.export`.
- ``{"do": "load", "files", "format", "way", "threads"}``: read the model; answers ``version`` of the program.
- ``{"do": "generate", "prompts", "count"}``: answers ``seconds`` of the call and ``tokens``.

An answer with ``error`` says why a command failed; the traceback is on standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.programs import Program

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Worker:
    def __init__(self, kind: type[Program]):
        self.kind = kind
        self.program: Program | None = None

    def export(self, model: str, out: str, format: str) -> dict[str, Any]:
        self.kind.export(Path(model), Path(out), format)
        return {}

    def load(self, files: str, format: str, way: str, threads: int) -> dict[str, Any]:
        self.program = self.kind(Path(files), format, way, threads)
        return {"version": version(self.kind.package)}

    def generate(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        assert self.program is not None
        began = time.perf_counter()
        tokens = self.program.generate(prompts, count)
        seconds = time.perf_counter() - began
        if [len(text) for text in tokens] != [count] * len(prompts):
            raise ValueError(f"texts of {[*map(len, tokens)]} tokens instead of {count}")
        return {"seconds": seconds, "tokens": [[*map(int, text)] for text in tokens]}


def _end_with_parent() -> None:
    """Have the kernel kill this process when the race ends, even killed: a stopped one would stay."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the program prints goes to the log
    module, name = sys.argv[1:]
    worker = Worker(getattr(import_module(module), name))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:  # a program that fails is reported, and the others go on
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
