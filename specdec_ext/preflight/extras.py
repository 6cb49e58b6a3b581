"""Optional dependencies: one place that knows how to get them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# Package -> the extra of pyproject.toml that has it.
_EXTRAS = {"accelerate": "train", "matplotlib": "train"}


def missing(module: str, purpose: str, otherwise: str = "") -> str | None:
    """Why an optional module can't be had, with the command that installs it; None if it can.

    Arguments as for :func:`require`.
    """
    try:
        require(module, purpose, otherwise)
    except ImportError as error:
        return str(error)
    return None


def require(module: str, purpose: str, otherwise: str = "") -> ModuleType:
    """An optional module.

    Args:
        module: such as ``"matplotlib.figure"``.
        purpose: what needs it, for the message.
        otherwise: a sentence that ends the message: what can be done without it.

    Raises:
        ImportError: if it is not installed, with the command that installs it.
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
