"""How numbers travel between the host and the device of a target."""

from specdec_ext.transfer.staging import Staged, Staging

__all__ = ["Staged", "Staging"]
