"""Decide quickly whether the name of a checkpoint is a path or a hub id, and whether the hub is reachable.

Without a network, huggingface_hub retries for most of a minute. For a mistyped path, it complains about an
invalid repository id. This module detects both cases at once and reports them clearly.
"""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, snapshot_download

SECONDS_TO_ANSWER = 3.0
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def on_disk(
    name: str | Path, revision: str | None = None, token: str | bool | None = None
) -> Path | None:
    """Return the local file or folder of a checkpoint, or None if it must be downloaded from the hub.

    If the hub is not reachable or HF_HUB_OFFLINE is set, a hub id gives its folder in the hub's cache.

    Raises:
        OSError: for a name that is neither an existing path nor of the form of a hub id, or a hub id that is
            not in the cache while the hub is not reachable.
    """
    if Path(name).exists():
        return Path(name)
    not_found = f"{str(name)!r} is neither a file nor a folder"
    if not _HUB_ID.fullmatch(str(name)):
        raise OSError(f"{not_found}, nor a hub id of the form 'org/name'")
    if hub_answers():
        return None
    try:
        return Path(
            snapshot_download(str(name), revision=revision, token=token, local_files_only=True)
        )
    except (OSError, ValueError) as error:
        why = f"{constants.ENDPOINT} does not answer"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE forbids a download"
        raise OSError(f"{not_found}, it is not in the hub's cache, and {why}") from error


def hub_answers() -> bool:
    """Whether the hub, or the proxy in front of it, accepts a connection; False if HF_HUB_OFFLINE is set."""
    if constants.HF_HUB_OFFLINE:
        return False
    url = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(url.scheme)
    if proxy is not None and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=SECONDS_TO_ANSWER).close()
        except OSError:
            return
        answered.set()

    # In a thread, because looking up a host name has no time limit.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(SECONDS_TO_ANSWER)
    return answered.is_set()
