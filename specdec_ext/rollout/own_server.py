"""``own_server``: a ``specdec serve`` in a process of its own, for as long as a rollout takes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from specdec_ext.display.text import one_line

_SECONDS_TO_END = 60.0
_KEY = "SPECDEC_API_KEY"


@contextmanager
def own_server(arguments: Sequence[str], api_key: str | None = None) -> Iterator[str]:
    """Start ``specdec serve`` on a free port, and end it afterwards.

    Client and server do not share an interpreter, so that the client's work does not slow the server down.

    Args:
        arguments: further arguments of ``specdec serve``, the model first.
        api_key: key of the server; None for none.

    Yields:
        The address of the server.

    Raises:
        ValueError: if it ends by itself; the message has the end of its log.
    """
    command = [sys.executable, "-m", "specdec_ext.cli", "serve", *arguments]
    command += ["--port", "0", "--log-format", "json"]
    environment = {name: value for name, value in os.environ.items() if name != _KEY}
    if api_key is not None:
        environment[_KEY] = api_key
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=file, env=environment
            )
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server has written its address to its log, and accepts connections there."""
    while True:
        ended = process.poll() is not None
        text = log.read_text("utf-8", errors="replace")
        for line in text.split("\n")[:-1]:  # the last one may be incomplete
            if (
                line.startswith("{")
                and "url" in (told := json.loads(line))
                and _listens(told["url"])
            ):
                return str(told["url"])
        if ended:
            raise ValueError(f"specdec serve has ended by itself: {one_line(text)[-400:]}")
        time.sleep(0.1)


def _listens(url: str) -> bool:
    place = urlsplit(url)
    try:
        socket.create_connection((str(place.hostname), int(place.port or 0)), 1).close()
    except OSError:
        return False
    return True
