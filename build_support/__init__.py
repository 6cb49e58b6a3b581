"""What ``setup.py`` does beyond setuptools: find and check compilers, choose GPU architectures, run ninja."""


class BuildError(Exception):
    """A sentence for the user: what is missing or wrong, and the way out."""
