"""The Hugging Face side: model, cache, masks. Only this package knows transformers' internals."""

from specdec_ext.target.factory import make_target
from specdec_ext.target.model import Target, TargetOutput, vocab_size
from specdec_ext.target.support import Support, supports

__all__ = ["Support", "Target", "TargetOutput", "make_target", "supports", "vocab_size"]
