"""The Hugging Face side: model, cache, masks. Only this package knows transformers' internals."""

from specdec_ext.target.model import Target, TargetOutput

__all__ = ["Target", "TargetOutput"]
