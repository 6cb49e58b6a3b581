"""The native build behind ``setup.py``: find and check compilers, choose GPU architectures, run ninja."""


class BuildError(Exception):
    """A build problem; the message is one sentence with the problem and its solution."""
