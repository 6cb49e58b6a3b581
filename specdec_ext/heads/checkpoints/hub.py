"""Names of checkpoints: is it a path, or a hub id, and does the hub answer?

huggingface_hub tries a name that it can't find for most of a minute where there is no network, and says of a
mistyped path that it is no valid repository id. Both are found out here, at once.
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
    """The folder or file of this name on this machine; None for a hub id that the hub is to be asked for.

    Where the hub may not be asked or does not answer, that is the folder in its cache.

    Raises:
        OSError: for a name that is neither a path of this machine nor the shape of a hub id, or a hub id that
            is not in the cache while the hub does not answer.
    """
    if Path(name).exists():
        return Path(name)
    known = f"{str(name)!r} is neither a file nor a folder here"
    if not _HUB_ID.fullmatch(str(name)):
        raise OSError(f"{known}, and no hub id, which is 'org/name'")
    if hub_answers():
        return None
    try:
        return Path(
            snapshot_download(str(name), revision=revision, token=token, local_files_only=True)
        )
    except (OSError, ValueError) as error:
        why = f"{constants.ENDPOINT} does not answer"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE forbids to fetch it"
        raise OSError(f"{known}, not in the hub's cache, and {why}") from error


def hub_answers() -> bool:
    """Whether the hub, or the proxy in front of it, takes a connection; False if HF_HUB_OFFLINE is set."""
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

    # Looking up a host name has no time limit of its own.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(SECONDS_TO_ANSWER)
    return answered.is_set()
