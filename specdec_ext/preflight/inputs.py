"""Files that somebody else may have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def regular_file(path: str | os.PathLike[str], expected: str) -> Path:
    """The path, if a regular file is there: reading a pipe or a device may never end.

    Args:
        path: to be opened next.
        expected: what should be there, for the message.

    Raises:
        FileNotFoundError: if nothing is there.
        IsADirectoryError: for a folder.
        OSError: for a pipe, a socket or a device.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a folder; expected {expected}")
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is a pipe, a socket or a device; expected {expected}")
    return Path(path)
