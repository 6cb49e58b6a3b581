"""``load_draft``: read a checkpoint of any supported layout as a ``DraftHead`` or ``MedusaHeads``."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specdec_ext.heads.checkpoints.config.decoder import rope_parameters
from specdec_ext.heads.checkpoints.config.eagle import head_config
from specdec_ext.heads.checkpoints.config.fields import Fields, shown
from specdec_ext.heads.checkpoints.medusa import looks_like_medusa, read_medusa
from specdec_ext.heads.checkpoints.storage.files import Checkpoint, open_checkpoint
from specdec_ext.heads.checkpoints.storage.names import canonical_names, eagle_kind, is_head
from specdec_ext.heads.checkpoints.storage.tensors import head_tensors
from specdec_ext.heads.config import DraftHead, HeadConfig
from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.heads.record import HeadRecord
from specdec_ext.heads.rope import rope_tables

_log = logging.getLogger(__name__)

# Fields that no tensor confirms, so a config.json may be wrong and a caller may override it.
OVERRIDES = (
    "feature_layers",
    "logit_scale",
    "mask_token_id",
    "norm_before_residual",
    "norm_output",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_windows",
)


def load_draft(
    path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    dtype: torch.dtype | None = None,
    keep: bool = True,
    **overrides: Any,
) -> DraftHead | MedusaHeads:
    """Read a draft head, or Medusa heads, from a checkpoint.

    Supported layouts: SafeAILab EAGLE-1 (also used by EAGLE-2) and EAGLE-3, SpecForge/SGLang, vLLM
    ``speculators`` (eagle3, peagle, mtp), Medusa. The layout is recognised by the names of the tensors.

    Args:
        path: folder, weight file with a config.json beside it, or hub id ``"org/name"``.
        revision: branch, tag or commit on the hub.
        token: access token for the hub.
        dtype: dtype of the weights; by default that of the checkpoint.
        keep: if False, every tensor of an EAGLE head is checked once and then read from its file each time it
            is used. A drafter that repacks the weights then needs the memory only once. The file must stay
            in place.
        **overrides: fields of ``HeadConfig`` that replace those of the checkpoint; only the names in
            ``OVERRIDES``, and None keeps the checkpoint's value. Checkpoints are known to be wrong about two
            of them: ``feature_layers`` (ids have two meanings, see ``checkpoints.feature_layers``) and
            ``norm_output`` (it had another meaning in SpecForge before September 2026).

    Returns:
        The head, with its config, tensors and the record of its checkpoint.

    Raises:
        OSError: if the checkpoint does not exist.
        ValueError: if it is damaged, contradictory or of an unsupported kind.
    """
    unknown = sorted(overrides.keys() - set(OVERRIDES))
    if unknown:
        raise ValueError(
            f"load_draft can't override {', '.join(unknown)}; it can override {', '.join(OVERRIDES)}"
        )
    checkpoint = open_checkpoint(path, revision, token)
    if not looks_like_medusa(checkpoint.tensors):
        return _eagle(checkpoint, dtype, keep, overrides)
    if overrides:
        raise ValueError(
            f"{checkpoint.source} holds Medusa heads, which have no {', '.join(overrides)}; leave that out"
        )
    return read_medusa(checkpoint.tensors, checkpoint.config, checkpoint.source, dtype)


def is_draft(path: str | Path) -> bool:
    """Whether a checkpoint is a draft head and not a whole model; a hub id is downloaded.

    Raises:
        OSError: if the checkpoint does not exist.
        ValueError: if its files can't be read.
    """
    checkpoint = open_checkpoint(path)
    names = canonical_names(checkpoint.tensors, checkpoint.source)
    return is_head(names) or looks_like_medusa(checkpoint.tensors)


def _eagle(
    checkpoint: Checkpoint, dtype: torch.dtype | None, keep: bool, overrides: dict[str, Any]
) -> DraftHead:
    source = checkpoint.source
    names = canonical_names(checkpoint.tensors, source)
    stored = {ours: checkpoint.tensors[name] for ours, name in names.items()}
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    kind, mask_token_id = eagle_kind(names, source), overrides.get("mask_token_id")
    config, record = head_config(kind, checkpoint.config, shapes, mask_token_id)
    config, record = _overridden(config, record, overrides, source)
    _check_rope(config, source)
    tied = record.tied and config.own_embedding
    if tied:
        config = replace(config, own_lm_head=False)
    tensors, ignored = head_tensors(config, stored, names, source, dtype, keep)
    if tied:
        config = replace(config, own_lm_head=True)
        tensors = dict(tensors)
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    record = replace(record, ignored=ignored, tied=record.tied and not tied)
    _log.info("%s is read as %s, hidden states from %s", source, record.format, record.layers_from)
    return DraftHead(config, tensors, source, record)


def _check_rope(config: HeadConfig, source: str) -> None:
    """Refuse rope parameters from which transformers can't compute finite tables."""
    try:
        usable = all(bool(table.isfinite().all()) for table in rope_tables(config, 2))
        reason = "its angles are not finite"
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        usable, reason = False, f"{type(error).__name__}: {error}"
    if not usable:
        raise ValueError(
            f"{source}: rope_parameters {shown(dict(config.rope_parameters))} can't be used: {reason}; pass "
            "rope_parameters=... to load_draft"
        )


def _overridden(
    config: HeadConfig, record: HeadRecord, overrides: dict[str, Any], source: str
) -> tuple[HeadConfig, HeadRecord]:
    """Apply the caller's values to the config; they are checked like those of a file."""
    given = Fields(overrides, "load_draft")
    for name in ("norm_before_residual", "norm_output"):
        given.flag(name, False)
    for name in ("logit_scale", "rms_norm_eps"):
        given.number(name, 1.0)
    checked = {name: value for name, value in overrides.items() if value is not None}
    if "rope_parameters" in given:
        checked["rope_parameters"] = rope_parameters(given)
    if "sliding_windows" in given:
        checked["sliding_windows"] = windows = tuple(overrides["sliding_windows"])
        if len(windows) != config.num_layers or not all(w is None or w > 0 for w in windows):
            raise ValueError(
                f"sliding_windows={windows}; expected a number of tokens or None for each of the "
                f"{config.num_layers} layers of {source}"
            )
    if "feature_layers" in given:
        checked["feature_layers"] = layers = tuple(overrides["feature_layers"])
        if len(set(layers)) != config.num_features or min(layers) < -1:
            raise ValueError(
                f"feature_layers={layers}; {source} reads {config.num_features} different hidden states of "
                "the target, numbered from 0, or -1 for the last"
            )
        record = replace(record, layers_from="the argument feature_layers")
    ambiguous = tuple(name for name in record.ambiguous if name not in checked)
    return replace(config, **checked), replace(record, ambiguous=ambiguous)
