"""Speculative decoding for Hugging Face models that emits what the model alone would have emitted."""

from specdec_ext.comparison import ComparedRuns, compare_runs
from specdec_ext.drafters import Drafter, DraftModelDrafter, NgramDrafter
from specdec_ext.generation import custom_generate, generate
from specdec_ext.output import SpeculativeOutput
from specdec_ext.stats import SpeculationStats
from specdec_ext.tree import DraftTree

__version__ = "0.1.0"

__all__ = [
    "ComparedRuns",
    "DraftModelDrafter",
    "DraftTree",
    "Drafter",
    "NgramDrafter",
    "SpeculationStats",
    "SpeculativeOutput",
    "compare_runs",
    "custom_generate",
    "generate",
]
