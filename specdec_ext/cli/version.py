"""``specdec version``: installed versions, and whether the CUDA kernels were built."""

from __future__ import annotations

import platform
from importlib.metadata import version as installed_version
from pathlib import Path

import typer


def version() -> None:
    """Print the installed versions and whether the CUDA kernels were built."""
    import specdec_ext

    kernels = "built" if _cuda_kernels_built() else "not built (needs nvcc at build time)"
    typer.echo(f"specdec_ext {specdec_ext.__version__}")
    typer.echo(
        f"torch {installed_version('torch')}, transformers {installed_version('transformers')}"
    )
    typer.echo(f"Python {platform.python_version()}")
    typer.echo(f"CUDA kernels: {kernels}")


def _cuda_kernels_built() -> bool:
    """Whether the library has a section of GPU code. (Every build registers the ops for CUDA.)"""
    import specdec_ext

    # specdec_ext.ops knows the path, but importing it imports torch.
    library = Path(specdec_ext.__file__).parent / "_ops.abi3.so"
    return library.exists() and b".nv_fatbin" in library.read_bytes()
