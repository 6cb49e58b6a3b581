"""Optional dependencies, and the commands that install them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# Package -> the extra of pyproject.toml that installs it.
_EXTRAS = {
    "accelerate": "train",
    "fastapi": "serve",
    "httpx2": "serve",
    "llguidance": "structured",
    "matplotlib": "plot",
    "openai": "serve",
    "prometheus_client": "serve",
    "pyarrow": "parquet",
    "ray": "ray",
    "uvicorn": "serve",
}


def require(module: str, purpose: str, otherwise: str = "") -> ModuleType:
    """Import an optional module.

    Args:
        module: name of the module, such as ``"matplotlib.figure"``.
        purpose: the function or option that needs it, for the message.
        otherwise: last sentence of the message: what can be done without the module.

    Raises:
        ImportError: if it is not installed; the message has the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = (
            f"{purpose} needs {package}, which is not installed; in a checkout of specdec_ext: "
            f"pip install '.[{_EXTRAS[package]}]'"
        )
        raise ImportError(f"{message}. {otherwise}" if otherwise else message) from error
