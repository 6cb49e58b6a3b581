"""``TORCH``: the requirement of peers whose tools need torch, in the version of this environment."""

from importlib.metadata import PackageNotFoundError, version

try:
    # Without the local part, such as +cpu, which an index may lack.
    TORCH = f"torch=={version('torch').split('+')[0]}"
except PackageNotFoundError:  # in the environment of a peer that has none
    TORCH = "torch"
