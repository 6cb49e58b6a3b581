"""Checks, before long work begins, that its results can be written and fit on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def writable_file(path: Path, option: str) -> None:
    """Refuse a file that can't be written, or whose folder does not exist.

    Args:
        path: path of the file; an existing file will be replaced.
        option: the option that named it, for the message.

    Raises:
        OSError: with the reason.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{option} {path} is not a regular file; choose another path")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{option} {path}: the folder {path.parent} does not exist; create it first"
        )
    _check_access(path if path.exists() else path.parent, f"{option} {path}")


def writable_folder(path: Path, option: str) -> None:
    """Refuse a folder that can't be written to or, if it does not exist, created with its parents.

    Raises:
        OSError: with the reason.
    """
    existing = _nearest_existing(path)
    if not existing.is_dir():
        raise NotADirectoryError(
            f"{option} {path}: {existing} is not a folder; choose another path"
        )
    _check_access(existing, f"{option} {path}")


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of a file or folder that need not exist yet."""
    return shutil.disk_usage(_nearest_existing(path)).free


def _nearest_existing(path: Path) -> Path:
    """The path itself or the nearest of its parents that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def _check_access(path: Path, what: str) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(
            f"{what}: no permission to write to {path}; choose another path, or change its permissions"
        )
