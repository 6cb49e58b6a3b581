"""Functions that make a drafter of every kind for the tiny Llama."""

from __future__ import annotations

from collections.abc import Callable

from helpers.drafters.head_cases import head_of
from helpers.drafters.medusa_cases import random_heads
from helpers.drafters.mtp_cases import llama_heads
from helpers.models.tiny import tiny_model

from specdec_ext import (
    CombinedDrafter,
    Drafter,
    DraftModelDrafter,
    HeadDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    MtpDrafter,
    NgramDrafter,
    SuffixDrafter,
    TreeConfig,
)
from specdec_ext.models.compat import MtpModel

MEDUSA_TREE = TreeConfig(depth=3, top_k=3, num_nodes=9)
# Drafters for any architecture with the vocabulary and the width of the tiny models.
GENERAL: dict[str, Callable[[], Drafter]] = {
    "suffix tree": lambda: SuffixDrafter(offset=2.0),
    "suffix chain": lambda: SuffixDrafter(tree=False, offset=2.0),
    "lookahead": LookaheadDrafter,
    "medusa": lambda: MedusaDrafter(random_heads()),
    "medusa dynamic": lambda: MedusaDrafter(random_heads(), MEDUSA_TREE),
    "ngram and model": lambda: CombinedDrafter(
        NgramDrafter(min_ngram=1), DraftModelDrafter(tiny_model("qwen3")), 2, max_nodes=10
    ),
    "suffix and medusa": lambda: CombinedDrafter(SuffixDrafter(), MedusaDrafter(random_heads()), 2),
}
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    **GENERAL,
    "none": lambda: None,
    "ngram": lambda: NgramDrafter(min_ngram=1),
    "draft model": lambda: DraftModelDrafter(tiny_model("qwen3")),
    "draft model, sampled": lambda: DraftModelDrafter(tiny_model("qwen3"), sampled=True),
    "head": lambda: HeadDrafter(head_of("eagle3")),
    "p-eagle": lambda: HeadDrafter(head_of("p-eagle")),
    **({"mtp": lambda: MtpDrafter(llama_heads())} if MtpModel is not None else {}),
}
# Drafters that can draft after a round which the host has not read.
AHEAD: dict[str, Callable[[], Drafter | None]] = {
    "none": DRAFTERS["none"],
    "ngram": DRAFTERS["ngram"],
    "ngram tree": lambda: NgramDrafter(min_ngram=1, num_branches=3),
    "head": DRAFTERS["head"],
    "head tree": lambda: HeadDrafter(head_of("eagle3"), TreeConfig(3, top_k=3, num_nodes=8)),
    "p-eagle": DRAFTERS["p-eagle"],
    "combined": lambda: CombinedDrafter(
        NgramDrafter(min_ngram=1), HeadDrafter(head_of("eagle3")), 2, max_nodes=10
    ),
}
