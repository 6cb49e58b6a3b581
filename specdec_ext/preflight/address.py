"""``Address``: the address of a server, as it is given on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Address:
    """The address of a server.

    Attributes:
        name: scheme, host and port, without a password.
        origin: the same with a user and a password, if they were given.
        path: without a slash at its end.
    """

    name: str
    origin: str
    path: str

    @classmethod
    def parse(cls, url: str, argument: str) -> Address:
        """Split an address.

        Args:
            url: the address.
            argument: where it was given, for the message.

        Raises:
            ValueError: if it is none of http or https.
        """
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"{argument} {url}: expected an address such as http://127.0.0.1:8000")
        name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        return cls(name, f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/"))
