"""A program in a process of its own that is stopped while it is not asked, and the CPU time of all others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from peers.programs import Program

ROOT = Path(__file__).resolve().parents[2]
PATHS = (
    ROOT / "profiling",
    ROOT,
)  # where a worker finds ``peers`` and, in this environment, ``specdec_ext``
SECONDS = 1800  # that an answer may take; an export of a large model takes minutes
TAIL = 600  # characters of a log that an error shows


class Failed(RuntimeError):
    """A program can't be installed, does not know the model, or fails; it is left out."""


def log_tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-TAIL:]


class Process:
    """``peers.worker`` in the environment of a program.

    Between two commands the process and its children are stopped (SIGSTOP): threads of some programs go on
    spinning after a call, and would take time from the program that is measured next.

    Args:
        python: of the environment.
        program: what it runs.
        threads: of its computations.
        log: the file for what it prints.
    """

    def __init__(self, python: Path, program: type[Program], threads: int, log: Path):
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        settings = {
            "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [str(python), "-m", "peers.worker", program.__module__, program.__name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **settings},
                start_new_session=True,
            )
        self._pause()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer of the worker to a command.

        Raises:
            Failed: if the command fails, the process ends, or ``SECONDS`` have passed.
        """
        assert self._process.stdin and self._process.stdout
        watch = threading.Timer(SECONDS, self._signal, [signal.SIGKILL])
        watch.start()
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            self._pause()
            watch.cancel()
        if not line:
            raise Failed(f"the process has ended:\n{log_tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def cpu_seconds(self) -> float:
        """CPU time of the process and its children so far."""
        return sum(seconds for group, seconds in _processes() if group == self._process.pid)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin and self._process.stdout
        for pipe in (self._process.stdin, self._process.stdout):
            # What a process that has ended did not read is lost.
            with suppress(BrokenPipeError):
                pipe.close()

    def _pause(self) -> None:
        """Stop the process, and wait until it is stopped or has ended."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def busy_seconds() -> float:
    """CPU time of everything on the machine so far."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _processes() -> list[tuple[int, float]]:
    """Process group and CPU time of every process."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        ticks = int(fields[11]) + int(fields[12])
        found.append((int(fields[2]), ticks / os.sysconf("SC_CLK_TCK")))
    return found
