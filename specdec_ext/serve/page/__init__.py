"""The page at ``/``: a prompt whose drafts are marked, and what the server is doing; ``/state`` feeds it."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse

from specdec_ext.serve.page.state import State, state_of
from specdec_ext.serve.service import Service

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
# The page shows texts of models, which may hold anything: nothing but its own files is loaded or run.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, service: Service) -> None:
    """Let ``app`` answer requests for the page, its files and the state that it shows."""
    began = time.monotonic()

    def add_file(path: str, name: str, media_type: str) -> None:
        @app.get(path, include_in_schema=False)
        async def file() -> FileResponse:
            return FileResponse(
                Path(__file__).with_name(name), media_type=media_type, headers=_HEADERS
            )

    for path, (name, media_type) in _FILES.items():
        add_file(path, name, media_type)

    @app.get("/state")
    async def state() -> State:
        """What the server is doing, as the page shows it."""
        return state_of(service, time.monotonic() - began)
