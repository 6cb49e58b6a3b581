"""Drafters and how a ``drafter=`` argument names one.

A drafter that only some calls use is imported when it is named.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import PreTrainedModel

from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.draft_model import DraftModelDrafter
from specdec_ext.drafters.head import HeadDrafter
from specdec_ext.drafters.ngram import NgramDrafter

__all__ = ["DraftModelDrafter", "Drafter", "HeadDrafter", "NgramDrafter", "resolve_drafter"]

# Name -> module of this package and class, which is made without arguments.
_BY_NAME = {
    "auto": ("ngram", "NgramDrafter"),
    "ngram": ("ngram", "NgramDrafter"),
    "suffix": ("suffix", "SuffixDrafter"),
    "lookahead": ("lookahead", "LookaheadDrafter"),
}


def resolve_drafter(drafter: Any) -> Drafter | None:
    """What ``generate(drafter=...)`` accepts -> a ``Drafter``, or None for plain decoding.

    Raises:
        ValueError: for an unknown name.
        TypeError: for an object that is neither a drafter nor a model.
    """
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, str):
        if drafter not in _BY_NAME:
            raise ValueError(
                f"drafter={drafter!r} is not known; expected one of {sorted(_BY_NAME)}, None, a Hugging Face "
                "model or a specdec_ext.Drafter"
            )
        module, name = _BY_NAME[drafter]
        named: Drafter = getattr(import_module(f"{__name__}.{module}"), name)()
        return named
    if isinstance(drafter, PreTrainedModel):
        return DraftModelDrafter(drafter)
    raise TypeError(
        f"drafter is a {type(drafter).__name__}; expected a name ({sorted(_BY_NAME)}), None, a Hugging Face "
        "model or a specdec_ext.Drafter"
    )
