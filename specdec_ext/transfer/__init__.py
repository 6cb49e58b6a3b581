"""Copies of integers from the host to the device of a target."""

from specdec_ext.transfer.staging import Staged, Staging

__all__ = ["Staged", "Staging"]
