"""Checks of files before they are read; such files may be untrusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def regular_file(path: str | os.PathLike[str], expected: str) -> Path:
    """Return ``path`` if it is a regular file; reading a pipe or a device might never end.

    Args:
        path: path of the file.
        expected: description of the file that was expected, for the message.

    Raises:
        FileNotFoundError: if the path does not exist.
        IsADirectoryError: for a folder.
        OSError: for a pipe, a socket or a device.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a folder; expected {expected}")
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is a pipe, a socket or a device; expected {expected}")
    return Path(path)
