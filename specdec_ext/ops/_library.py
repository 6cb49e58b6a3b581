"""Loads the op library and provides the namespace that the wrappers call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

LIBRARY_PATH = Path(__file__).parent.parent / "_ops.abi3.so"
OLDEST_TORCH = "2.10"  # the first version with the stable ABI that csrc/ops/torch_abi declares


def _load_library() -> None:
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        raise ImportError(
            f"specdec_ext needs torch >= {OLDEST_TORCH}, and torch {torch.__version__} is installed: "
            "pip install --upgrade torch"
        )
    if not LIBRARY_PATH.exists():
        raise ImportError(
            f"specdec_ext's op library was not built: {LIBRARY_PATH} does not exist. "
            "Build it with `pip install -e .` in the source tree."
        )
    try:
        torch.ops.load_library(LIBRARY_PATH)
    except OSError as error:
        raise ImportError(
            f"specdec_ext's op library {LIBRARY_PATH} does not load under torch "
            f"{torch.__version__}: {error}. "
            "It needs the platform it was built on; rebuild it with "
            "`pip install --force-reinstall --no-deps .`"
        ) from error


_load_library()

# The ops that the wrappers call. Tests replace them by the same ops on emulated CUDA kernels.
native: Any = torch.ops.specdec
