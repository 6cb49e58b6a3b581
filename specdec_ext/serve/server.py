"""Runs the application: listens, and ends on signals without cutting streams off."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from specdec_ext.engine import AnyEngine
from specdec_ext.serve.app import create_app
from specdec_ext.serve.service import Settings

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """uvicorn's server with two changes for signals.

    The first SIGINT or SIGTERM stops accepting connections; requests that were accepted are finished, and
    :meth:`run` returns. A second one ends the process at once.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        log.info("stopping: requests that were accepted go on; a second signal ends at once")


def bound(host: str, port: int) -> socket.socket:
    """A socket with an address, on which nothing listens yet.

    Args:
        host: name or IP address.
        port: port; 0 takes a free one.

    Raises:
        OSError: the address is not there, or it is in use.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise OSError(f"can't listen on {host}, port {port}: {error.strerror}") from error
    return found


def serve(engine: AnyEngine, settings: Settings, place: socket.socket) -> None:
    """Serve until a signal arrives, and shut the engine down.

    Args:
        engine: an engine with a tokenizer.
        settings: the options of the server.
        place: the socket to listen on, of :func:`bound`.
    """
    config = uvicorn.Config(
        create_app(engine, settings),
        log_config=None,
        access_log=False,  # each request has one line of ours
        server_header=False,
    )
    host, port = place.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    fields = {"model": settings.model_name, "url": f"http://{where}/v1"}
    log.info("serving", extra={"fields": fields})
    Server(config).run([place])
    log.info("ended; every accepted request was finished")
