"""Servers of the bundled model in processes: ours, ``transformers serve`` and llama.cpp's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

SECONDS = 120  # in which a server must have started


@dataclass(frozen=True)
class Contestant:
    """How to start a server and how to ask it.

    Attributes:
        command: the command; ``{port}`` is replaced.
        ready: a path that answers with status 200 when the server is ready.
        body: fields of every request, the model's name among them.
    """

    command: list[str]
    ready: str
    body: Mapping[str, Any] = field(default_factory=dict)


def contestants(
    folder: Path, dtype: str, threads: int, llama: Path | None, gguf: Path
) -> dict[str, Contestant]:
    """All servers by name.

    Args:
        folder: the bundled model.
        dtype: of its weights.
        threads: of each server.
        llama: Python with the package llama-cpp-python[server]; None leaves llama.cpp out.
        gguf: the model as a GGUF file.
    """
    binaries = Path(sys.executable).parent
    address = ["--host", "127.0.0.1", "--port", "{port}"]
    ours = [str(binaries / "specdec"), "serve", "bundled", "--dtype", dtype, *address]
    theirs = [str(binaries / "transformers"), "serve", "--dtype", dtype, "--device", "cpu"]
    # transformers refuses ignore_eos; the prompts are chosen so that no text ends early.
    asked, known = {"model": "bundled"}, {"model": str(folder)}
    found = {
        "specdec, auto": Contestant(ours, "/health", asked),
        "specdec, plain": Contestant([*ours, "--drafter", "none"], "/health", asked),
        "transformers": Contestant([*theirs, *address], "/health", known),
        "transformers, batching": Contestant(
            [*theirs, "--continuous-batching", *address], "/health", known
        ),
    }
    if llama is not None:
        # It decodes one request at a time; by default a new request would end the running one.
        options = ["--n_threads", str(threads), "--n_ctx", "0", "--interrupt_requests", "false"]
        command = [str(llama), "-m", "llama_cpp.server", "--model", str(gguf), *options, *address]
        found["llama.cpp"] = Contestant(command, "/v1/models", {"model": str(gguf)})
    return found


@contextmanager
def running(contestant: Contestant, threads: int, log: Path) -> Iterator[str]:
    """The address of the running server.

    Raises:
        RuntimeError: the server ends or does not answer in time; the message has the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [part.replace("{port}", str(port)) for part in contestant.command]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url + contestant.ready, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urlopen(url, timeout=5).close()
            return
        except (URLError, ConnectionError):
            time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} does not answer:\n{log.read_text()[-2000:]}")
