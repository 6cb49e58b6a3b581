"""Speculative decoding for Hugging Face models that emits what the model alone would have emitted.

Names are imported on first use. So ``specdec_ext.ops`` and ``specdec_ext.reference``, which need torch only,
do not import transformers.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_ext.drafters import Drafter, DraftModelDrafter, HeadDrafter, NgramDrafter
    from specdec_ext.drafters.combined import CombinedDrafter
    from specdec_ext.drafters.heads.assistant import AssistantDrafter
    from specdec_ext.drafters.heads.medusa import MedusaDrafter
    from specdec_ext.drafters.heads.mtp import MtpDrafter
    from specdec_ext.drafters.lookahead import LookaheadDrafter
    from specdec_ext.drafters.lookup.suffix import SuffixDrafter, SuffixHistory
    from specdec_ext.engine import Engine
    from specdec_ext.evaluate.check import Check, ModelCheck, check_model
    from specdec_ext.evaluate.compare import ComparedRuns, compare_runs
    from specdec_ext.generation import custom_generate, generate
    from specdec_ext.heads.checkpoints import load_draft, save_draft
    from specdec_ext.heads.medusa import MedusaHeads
    from specdec_ext.heads.mtp import MtpHeads
    from specdec_ext.hosts import install, uninstall, write_custom_generate
    from specdec_ext.models import Support, supports
    from specdec_ext.models.graphs import free_graphs
    from specdec_ext.models.quantised.convert import quantize
    from specdec_ext.models.quantised.repack import repack
    from specdec_ext.models.quantised.report import QuantisationReport
    from specdec_ext.output import SpeculativeEncoderDecoderOutput, SpeculativeOutput
    from specdec_ext.rollout.lock import PairLock
    from specdec_ext.schedule.settings import SpeculationConfig
    from specdec_ext.stats import SpeculationStats
    from specdec_ext.tree.config import TreeConfig
    from specdec_ext.tree.draft_tree import DraftTree

__version__ = "0.1.0"

__all__ = [
    "AssistantDrafter",
    "Check",
    "CombinedDrafter",
    "ComparedRuns",
    "DraftModelDrafter",
    "DraftTree",
    "Drafter",
    "Engine",
    "HeadDrafter",
    "LookaheadDrafter",
    "MedusaDrafter",
    "MedusaHeads",
    "ModelCheck",
    "MtpDrafter",
    "MtpHeads",
    "NgramDrafter",
    "PairLock",
    "QuantisationReport",
    "SpeculationConfig",
    "SpeculationStats",
    "SpeculativeEncoderDecoderOutput",
    "SpeculativeOutput",
    "SuffixDrafter",
    "SuffixHistory",
    "Support",
    "TreeConfig",
    "check_model",
    "compare_runs",
    "custom_generate",
    "free_graphs",
    "generate",
    "install",
    "load_draft",
    "quantize",
    "repack",
    "save_draft",
    "supports",
    "uninstall",
    "write_custom_generate",
]

_MODULES = {
    "heads.checkpoints": ("load_draft", "save_draft"),
    "evaluate.compare": ("ComparedRuns", "compare_runs"),
    "drafters": ("Drafter", "DraftModelDrafter", "HeadDrafter", "NgramDrafter"),
    "drafters.combined": ("CombinedDrafter",),
    "drafters.lookahead": ("LookaheadDrafter",),
    "drafters.heads.assistant": ("AssistantDrafter",),
    "drafters.heads.medusa": ("MedusaDrafter",),
    "drafters.heads.mtp": ("MtpDrafter",),
    "drafters.lookup.suffix": ("SuffixDrafter", "SuffixHistory"),
    "engine": ("Engine",),
    "generation": ("custom_generate", "generate"),
    "hosts": ("install", "uninstall", "write_custom_generate"),
    "heads.medusa": ("MedusaHeads",),
    "heads.mtp": ("MtpHeads",),
    "evaluate.check": ("Check", "ModelCheck", "check_model"),
    "output": ("SpeculativeEncoderDecoderOutput", "SpeculativeOutput"),
    "rollout.lock": ("PairLock",),
    "schedule.settings": ("SpeculationConfig",),
    "stats": ("SpeculationStats",),
    "models": ("Support", "supports"),
    "models.graphs": ("free_graphs",),
    "models.quantised.convert": ("quantize",),
    "models.quantised.repack": ("repack",),
    "models.quantised.report": ("QuantisationReport",),
    "tree.draft_tree": ("DraftTree",),
    "tree.config": ("TreeConfig",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


# Deprecated name -> its replacement.
_RENAMED = {"Speculation": "SpeculationConfig"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        message = f"specdec_ext.{name} is deprecated; use specdec_ext.{_RENAMED[name]}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # the next access does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
