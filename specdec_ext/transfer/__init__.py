"""Copies of integers between the host and the device of a target."""

from specdec_ext.transfer.arriving import Arriving
from specdec_ext.transfer.staging import Staged, Staging

__all__ = ["Arriving", "Staged", "Staging"]
