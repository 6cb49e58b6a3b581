"""Draft heads in the formats in which they are published, read into and written from ``DraftHead``."""

from specdec_ext.checkpoints.load import load_draft

__all__ = ["load_draft"]
