"""Names of tensors: spellings of one thing made one, and checkpoints recognised by what they hold.

What a file holds says more than its config, whose ``architectures`` differ between tools for the same head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

# prefix in a file -> ours; "model." is dropped before.
_SPELLINGS = (
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
    ("draft_id_to_target_id", "d2t"),
)
# Pattern of a name -> what holds such a tensor; the first that is found names the refusal.
_OTHER_KINDS = (
    (r"lora_[AB]\b|lora_embedding", "a LoRA adapter"),
    (
        r"\.(qweight|qzeros|weight_packed|weight_scale\w*|weight_scale_inv|scales|absmax|g_idx)$",
        "a quantised checkpoint",
    ),
    (r"(kv_a_proj_with_mqa|kv_b_proj|q_a_proj)\.", "a model with latent attention (MLA)"),
    (r"(^|\.)(enorm|hnorm|eh_proj|pre_fc_norm_embedding|pre_fc_norm_hidden)\.", "an MTP head"),
    (r"^hidden_norm\.|^context_norm\.", "a DFlash head"),
    (r"\.experts?\.", "a model with a mixture of experts"),
)
# At least one of them is in every head of the EAGLE family.
_MARKS = {"fc.weight", "layers.0.hidden_norm.weight", "d2t", "mask_hidden"}
SUPPORTED = "EAGLE-1, EAGLE-2, EAGLE-3, EAGLE 3.1, P-EAGLE and Medusa"


def canonical_names(names: Iterable[str], source: str) -> dict[str, str]:
    """Our name of each tensor -> its name in the file.

    Raises:
        ValueError: if two of a file's tensors are the same one.
    """
    found: dict[str, str] = {}
    for name in sorted(names):
        ours = name.removeprefix("model.")
        for prefix, replacement in _SPELLINGS:
            if ours.startswith(prefix):
                ours = replacement + ours.removeprefix(prefix)
                break
        if ours in found:
            raise ValueError(f"{source}: {found[ours]} and {name} are two spellings of one tensor")
        found[ours] = name
    return found


def eagle_kind(names: Iterable[str], source: str) -> Literal["eagle1", "eagle3"]:
    """The kind of head that tensors with our names make.

    Raises:
        ValueError: for tensors of another kind, which is named.
    """
    names = set(names)
    for pattern, kind in _OTHER_KINDS:
        example = next((name for name in sorted(names) if re.search(pattern, name)), None)
        if example is not None:
            raise ValueError(
                f"{source} is {kind} (it has {example}), which is not supported; supported are {SUPPORTED}"
            )
    if is_head(names):
        return "eagle3" if {*_MARKS - {"fc.weight"}, "norm.weight"} & names else "eagle1"
    if {"embed_tokens.weight", "transformer.wte.weight"} & names:
        raise ValueError(
            f"{source} is a language model, or a head that has lost its fc.weight and hidden_norm; a "
            "language model is a drafter when it is loaded with transformers and passed as a model"
        )
    raise ValueError(
        f"{source} is no draft head: neither fc.weight nor layers.0.hidden_norm.weight is in it, but "
        f"{', '.join(sorted(names)[:4]) or 'nothing'}; supported are {SUPPORTED}"
    )


def is_head(names: Iterable[str]) -> bool:
    """Whether tensors with our names are those of a draft head, be it one that is not supported."""
    return bool(_MARKS & set(names))
