"""Drafters, which propose tokens. :mod:`specdec_ext.drafters.resolve` resolves ``drafter=`` arguments."""

from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.draft_model import DraftModelDrafter
from specdec_ext.drafters.heads.head import HeadDrafter
from specdec_ext.drafters.lookup.ngram import NgramDrafter
from specdec_ext.drafters.resolve import resolve_drafter

__all__ = ["DraftModelDrafter", "Drafter", "HeadDrafter", "NgramDrafter", "resolve_drafter"]
