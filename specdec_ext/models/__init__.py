"""The target: a Hugging Face model with its cache and attention masks during one ``generate`` call.

Only this package depends on internals of transformers.
"""

from specdec_ext.models.base import Target, TargetOutput
from specdec_ext.models.factory import make_target
from specdec_ext.models.support import Support, supports

__all__ = ["Support", "Target", "TargetOutput", "make_target", "supports"]
