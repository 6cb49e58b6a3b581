"""Drafters and how a ``drafter=`` argument names one.

A drafter that only some calls use is imported when it is named.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.draft_model import DraftModelDrafter
from specdec_ext.drafters.head import HeadDrafter
from specdec_ext.drafters.ngram import NgramDrafter
from specdec_ext.head import DraftHead
from specdec_ext.medusa import MedusaHeads
from specdec_ext.target.wrapped import unwrapped

__all__ = ["DraftModelDrafter", "Drafter", "HeadDrafter", "NgramDrafter", "resolve_drafter"]

# Name -> module of this package and what makes the drafter, called without arguments.
_BY_NAME = {
    "ngram": ("ngram", "NgramDrafter"),
    "suffix": ("suffix", "SuffixDrafter"),
    "lookahead": ("lookahead", "LookaheadDrafter"),
}
# What ``generate`` takes; "auto" depends on the model (:mod:`specdec_ext.drafters.auto`).
NAMES = ["auto", *sorted(_BY_NAME)]


def resolve_drafter(drafter: Any) -> Drafter | None:
    """What ``generate(drafter=...)`` accepts, "auto" aside -> a ``Drafter``, or None for plain decoding.

    A draft head is named by its folder or hub id, or is a ``DraftHead`` or ``MedusaHeads`` already.

    Raises:
        ValueError: for an unknown name, or a checkpoint that can't be used.
        OSError: for a path or hub id with nothing behind it.
        TypeError: for an object that is neither a drafter, a head nor a model.
    """
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, (str, Path)):
        return _named(str(drafter))
    if isinstance(drafter, (DraftHead, MedusaHeads)):
        return _of_head(drafter)
    if isinstance(unwrapped(drafter), PreTrainedModel):
        return DraftModelDrafter(unwrapped(drafter))
    raise TypeError(
        f"drafter is a {type(drafter).__name__}; expected a name ({NAMES}), a folder or hub id "
        "of a draft head, None, a Hugging Face model or a specdec_ext.Drafter"
    )


def _named(name: str) -> Drafter:
    if name in _BY_NAME:
        module, class_name = _BY_NAME[name]
        drafter: Drafter = getattr(import_module(f"{__name__}.{module}"), class_name)()
        return drafter
    if "/" not in name and not Path(name).exists():
        raise ValueError(
            f"drafter={name!r} is not known; expected one of {NAMES}, a folder or hub id "
            "of a draft head, None, a Hugging Face model or a specdec_ext.Drafter"
        )
    from specdec_ext.checkpoints import load_draft

    return _of_head(load_draft(name, keep=False))


def _of_head(head: DraftHead | MedusaHeads) -> Drafter:
    if isinstance(head, DraftHead):
        return HeadDrafter(head)
    from specdec_ext.drafters.medusa import MedusaDrafter

    return MedusaDrafter(head)
