"""Canonical names of tensors, and recognition of a checkpoint by its tensors.

The tensors are more reliable than the config: tools write different ``architectures`` for the same head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from specdec_ext.heads.config import Kind

# Prefix in a file -> our prefix; a leading "model." is removed first.
_SPELLINGS = (
    ("midlayer.", "layers.0."),
    ("mtp_layers.0.token_layernorm.", "embedding_norm."),
    ("mtp_layers.0.hidden_layernorm.", "hidden_norm."),
    ("mtp_layers.0.input_proj.", "fc."),
    ("mtp_layers.0.final_layernorm.", "norm."),
    ("mtp_layers.", "layers."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
    ("draft_id_to_target_id", "d2t"),
)
# Pattern of a tensor name -> an unsupported kind of draft head, which no language model has.
_OTHER_HEADS = (
    (r"(^|\.)(markov_head|confidence_head)\.", "a DSpark head"),
    (r"(^|\.)candidate_selector\.", "a DFlash2 head"),
    (r"(^|\.)refiner_head\.", "an XPress head"),
    (r"(^|\.)hydra_(lm_)?(head|mlp)", "a set of Hydra heads"),
    (r"(^|\.)rnn_[uw]\.", "a ReDrafter head"),
)
# The same for other checkpoints; the first match of all is named in the error.
_OTHER_KINDS = (
    *_OTHER_HEADS,
    (r"lora_[AB]\b|lora_embedding", "a LoRA adapter"),
    (
        r"\.(qweight|qzeros|weight_packed|weight_scale\w*|weight_scale_inv|scales|absmax|g_idx)$",
        "a quantised checkpoint",
    ),
    (r"(kv_a_proj_with_mqa|kv_b_proj|q_a_proj)\.", "a model with latent attention (MLA)"),
    (
        r"(^|\.)(enorm|hnorm|eh_proj|pre_fc_norm_embedding|pre_fc_norm_hidden)\.",
        "an MTP head of another layout than that of speculators",
    ),
    (r"^hidden_norm\.|^context_norm\.", "a DFlash head"),
    (r"\.experts?\.", "a model with a mixture of experts"),
)
# Every head of the EAGLE family has at least one of these tensors.
_HEAD_TENSORS = {"fc.weight", "layers.0.hidden_norm.weight", "d2t", "mask_hidden"}
SUPPORTED = "EAGLE-1, EAGLE-2, EAGLE-3, EAGLE 3.1, P-EAGLE, MTP and Medusa"


def canonical_names(names: Iterable[str], source: str) -> dict[str, str]:
    """Return a dict from our name of each tensor to its name in the file.

    Raises:
        ValueError: if two names in the file mean the same tensor.
    """
    found: dict[str, str] = {}
    for name in sorted(names):
        ours = name.removeprefix("model.")
        for prefix, replacement in _SPELLINGS:
            if ours.startswith(prefix):
                ours = replacement + ours.removeprefix(prefix)
                break
        if ours in found:
            raise ValueError(f"{source}: {found[ours]} and {name} are two names of one tensor")
        found[ours] = name
    return found


def mtp_name(name: str) -> str:
    """Return the name of a tensor of an MTP head in the layout of speculators."""
    spelt = {ours: theirs for theirs, ours in _SPELLINGS if theirs.startswith("mtp_layers")}
    ours = next(each for each in spelt if name.startswith(each))
    return spelt[ours] + name.removeprefix(ours)


def eagle_kind(names: Iterable[str], source: str) -> Kind:
    """Return the kind of head that has tensors with these canonical names.

    Raises:
        ValueError: for another kind of checkpoint; the message names the kind.
    """
    names = set(names)
    is_mtp = "embedding_norm.weight" in names
    searched = sorted(names - {"hidden_norm.weight"} if is_mtp else names)  # a name in both kinds
    for pattern, kind in _OTHER_KINDS:
        example = next((name for name in searched if re.search(pattern, name)), None)
        if example is not None:
            raise ValueError(
                f"{source} is {kind} (it has {example}), which is not supported; supported are {SUPPORTED}"
            )
    if is_mtp:
        return "mtp"
    if is_head(names):
        return "eagle3" if {*_HEAD_TENSORS - {"fc.weight"}, "norm.weight"} & names else "eagle1"
    if {"embed_tokens.weight", "transformer.wte.weight"} & names:
        raise ValueError(
            f"{source} is a language model, or a damaged head without fc.weight and hidden_norm. To use a "
            "language model as the drafter, load it with transformers and pass the model"
        )
    raise ValueError(
        f"{source} is not a draft head: it has neither fc.weight nor layers.0.hidden_norm.weight (it has "
        f"{', '.join(sorted(names)[:4]) or 'no tensors'}); supported are {SUPPORTED}"
    )


def is_head(names: Iterable[str]) -> bool:
    """Whether tensors with these canonical names belong to a draft head, supported or not."""
    names = set(names)
    others = (re.search(pattern, name) for pattern, _ in _OTHER_HEADS for name in names)
    return bool(_HEAD_TENSORS & names) or any(others)
