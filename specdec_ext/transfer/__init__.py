"""Copies of integers between the host and the device of a target."""

from specdec_ext.transfer.arriving import Arriving
from specdec_ext.transfer.staging import Latest, Staged, Staging

__all__ = ["Arriving", "Latest", "Staged", "Staging"]
