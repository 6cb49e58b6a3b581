"""Loads the op library and holds the namespace that the wrappers call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LIBRARY_PATH = Path(__file__).parent.parent / "_ops.abi3.so"


def _load_library() -> None:
    if not LIBRARY_PATH.exists():
        raise ImportError(
            f"specdec_ext's op library was not built: {LIBRARY_PATH} does not exist. "
            "Build it with `pip install --no-build-isolation -e .` in the source tree."
        )
    try:
        torch.ops.load_library(LIBRARY_PATH)
    except OSError as error:
        raise ImportError(
            f"specdec_ext's op library {LIBRARY_PATH} does not load under torch "
            f"{torch.__version__}: {error}. "
            "It needs torch >= 2.10 and the platform it was built on; rebuild it with "
            "`pip install --no-build-isolation --force-reinstall --no-deps .`"
        ) from error


_load_library()

# What the wrappers call. Tests put the same ops over emulated CUDA kernels here.
native: Any = torch.ops.specdec
