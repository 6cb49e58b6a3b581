"""Files and folders that will be written when long work is done: whether they can be, before it begins."""

from __future__ import annotations

import os
from pathlib import Path


def writable_file(path: Path, option: str) -> None:
    """Refuse a file that can't be written, or whose folder is not there.

    Args:
        path: of the file; one that is there will be replaced.
        option: what named it, for the message.

    Raises:
        OSError: naming what is in the way.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{option} {path} is no regular file; name another")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {path.parent}; make it first")
    _check_access(path if path.exists() else path.parent, f"{option} {path}")


def writable_folder(path: Path, option: str) -> None:
    """Refuse a folder that can't be written, or made with the folders above it.

    Raises:
        OSError: naming what is in the way.
    """
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{option} {path}: {existing} is no folder; name another")
    _check_access(existing, f"{option} {path}")


def _check_access(path: Path, what: str) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{what}: {path} can't be written; name another, or change its mode")
