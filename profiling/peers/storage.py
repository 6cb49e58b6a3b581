"""``built``: files and folders that are made once and kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


def built(folder: Path, make: Callable[[Path], None]) -> Path:
    """``folder``, which ``make`` makes if it is not there.

    It is made under another name first, so that a folder that is there is complete.
    """
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        if unfinished.exists():
            shutil.rmtree(unfinished)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(folder)
    return folder
