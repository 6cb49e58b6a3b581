"""Resolves ``drafter=`` arguments, in Python and on the command line: the one map from names to drafters.

A model's config may name its drafters: ``specdec_ext_draft`` is the hub id or folder of a draft head,
``specdec_ext_draft_model`` that of a draft model. A folder may be relative to the model's own folder, and
``save_pretrained`` keeps both fields. The value ``"bundled"`` means the head or draft model in this package
that belongs to the bundled target. No other place is searched.

``"mtp"`` is the heads for multi-token prediction in the target's own checkpoint.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from specdec_ext import assets
from specdec_ext.display.text import did_you_mean
from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.combined import CombinedDrafter
from specdec_ext.drafters.draft_model import DraftModelDrafter
from specdec_ext.drafters.heads.assistant import AssistantDrafter, is_assistant
from specdec_ext.drafters.heads.head import HeadDrafter
from specdec_ext.drafters.heads.mtp import MtpDrafter
from specdec_ext.drafters.lookup.ngram import NgramDrafter
from specdec_ext.heads.checkpoints.language_model import load_language_model, load_tokenizer
from specdec_ext.heads.checkpoints.load import is_draft, load_draft
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.heads.mtp import MtpHeads, no_mtp_reason
from specdec_ext.pretrained import unwrapped

_log = logging.getLogger(__name__)

# Name -> module and class of a drafter that needs no arguments.
_MADE = {
    "ngram": ("lookup.ngram", "NgramDrafter"),
    "suffix": ("lookup.suffix", "SuffixDrafter"),
    "lookahead": ("lookahead", "LookaheadDrafter"),
}
# Name -> (field of the model's config, description, function that loads the bundled one).
_OF_MODEL: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "head": ("specdec_ext_draft", "draft head", assets.load_head),
    "draft": ("specdec_ext_draft_model", "draft model", assets.load_draft),
}
BUNDLED = "bundled"
MTP = "mtp"
NAMES = ("auto", "none", *_MADE, *_OF_MODEL, MTP)
_EXPECTED = (
    f"expected one of {list(NAMES)}, the folder or hub id of a draft head or a draft model, "
    "None, a Hugging Face model or a specdec_ext.Drafter"
)

# Target -> {place -> (state of the place and the target, drafter)}, so that checkpoints are loaded and packed
# once. Each call drafts with a copy that shares only the weights.
_Loaded = dict[Hashable, tuple[object, Drafter]]
_loaded: WeakKeyDictionary[PreTrainedModel, _Loaded] = WeakKeyDictionary()
# Target -> why its MTP heads can't be used, so that "auto" looks for them once.
_without_mtp: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


def checked_drafter(drafter: Any) -> Drafter | str | Path | None:
    """Check ``drafter=`` before the target is known. Heads and models become drafters, names stay names.

    Raises:
        ValueError: for a text that is no known name and does not look like a path or hub id.
        TypeError: for an object that is neither a drafter, a head nor a model.
    """
    if drafter is None or isinstance(drafter, (Drafter, Path)):
        return drafter
    if isinstance(drafter, str):
        if drafter in NAMES or "/" in drafter or Path(drafter).exists():
            return drafter
        meant = did_you_mean(drafter, NAMES)
        raise ValueError(f"drafter={drafter!r} is not known{meant}; {_EXPECTED}")
    if isinstance(drafter, (DraftHead, MedusaHeads, MtpHeads)):
        return _of_head(drafter)
    if isinstance(unwrapped(drafter), PreTrainedModel):
        return _of_draft_model(unwrapped(drafter))
    raise TypeError(f"drafter is a {type(drafter).__name__}; {_EXPECTED}")


def resolve_drafter(drafter: Any, model: PreTrainedModel, tokenizer: Any = None) -> Drafter | None:
    """Convert the argument of ``generate(drafter=...)`` to a drafter, or to None for plain decoding.

    Args:
        drafter: as for :func:`specdec_ext.generate`.
        model: the target. Checkpoints that are loaded for it are kept as long as the target exists. A draft
            model is loaded in the target's dtype and on its device.
        tokenizer: the target's tokenizer, which is compared with the one in a draft model's folder; by
            default the one in the target's folder. If either is missing, the vocabularies are assumed equal.

    Raises:
        ValueError: for an unknown name, a name for which this model's config has no entry, or a checkpoint
            that can't be used with this model.
        OSError: for a path or hub id that does not exist.
        TypeError: for an object that is neither a drafter, a head nor a model.
    """
    drafter = checked_drafter(drafter)
    if not isinstance(drafter, (str, Path)):
        return drafter
    if drafter == "none":
        return None
    if drafter == "auto":
        return _auto(model, tokenizer)
    if drafter in _MADE:
        module, class_name = _MADE[drafter]
        made: Drafter = getattr(import_module(f"specdec_ext.drafters.{module}"), class_name)()
        return made
    if drafter == MTP:
        return _mtp(model)
    if drafter in _OF_MODEL:
        return _of_model(drafter, model, tokenizer)
    return _from_place(str(drafter), model, tokenizer)


def _auto(model: PreTrainedModel, tokenizer: Any) -> Drafter:
    if getattr(model.config, _OF_MODEL["head"][0], None) is not None:
        return CombinedDrafter(NgramDrafter(), _of_model("head", model, tokenizer))
    reason = no_mtp_reason(model) or _without_mtp.get(model)
    if reason is None:
        try:
            return CombinedDrafter(NgramDrafter(), _mtp(model))
        except (OSError, RuntimeError, ValueError) as error:
            # Many configs name MTP layers that the checkpoint does not contain.
            reason = _without_mtp[model] = str(error)
    _log.info("drafter='auto' is n-gram lookup: the model's config names no draft head; %s", reason)
    return NgramDrafter()


def _mtp(model: PreTrainedModel) -> Drafter:
    """The drafter of the heads for multi-token prediction in the target's checkpoint."""
    return _kept(MTP, None, model, lambda: MtpDrafter(MtpHeads(model)))


def _of_model(name: str, model: PreTrainedModel, tokenizer: Any) -> Drafter:
    """The head or draft model that the config of ``model`` names."""
    field, what, load_bundled = _OF_MODEL[name]
    named = getattr(model.config, field, None)
    if named is None:
        raise ValueError(
            f"drafter={name!r} is the {what} that model.config.{field} names, but the config of this "
            f"{type(model).__name__} has no such field; set it, pass the folder or hub id of a {what}, or "
            "use drafter='auto'"
        )
    if not isinstance(named, str) or not named:
        raise ValueError(
            f"model.config.{field} is {named!r}; set it to the folder or hub id of a {what}, or remove it"
        )
    if named == BUNDLED:
        return _kept((BUNDLED, name), None, model, lambda: _prepared(load_bundled(), model))
    beside = Path(str(model.config._name_or_path)) / named
    return _from_place(str(beside) if beside.is_dir() else named, model, tokenizer)


def _from_place(place: str, model: PreTrainedModel, tokenizer: Any) -> Drafter:
    """Load the head or draft model from a folder, a file or the hub."""

    def load() -> Drafter:
        if is_draft(place):
            return _prepared(load_draft(place, keep=False), model)
        return _draft_model(place, model, tokenizer)

    path = Path(place)
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    written = tuple((file.name, file.stat().st_mtime_ns) for file in files)
    return _kept(place, written, model, load)


def _kept(
    place: Hashable, written: object, model: PreTrainedModel, load: Callable[[], Drafter]
) -> Drafter:
    """Load from a place once per state of the place and the target; returns a copy of the drafter."""
    state = written, model.dtype, model.device
    kept = _loaded.setdefault(model, {})
    if place not in kept or kept[place][0] != state:
        _log.info("loading the drafter %s", place)
        kept[place] = state, load()
    return copy.copy(kept[place][1])


def _prepared(loaded: Any, model: PreTrainedModel) -> Drafter:
    if isinstance(loaded, PreTrainedModel):
        return _of_draft_model(loaded.to(model.device, model.dtype))  # type: ignore[arg-type]
    drafter = _of_head(loaded)
    drafter.feature_layers(model)  # checks head and target, and packs the weights for all copies
    return drafter


def _draft_model(place: str, model: PreTrainedModel, tokenizer: Any) -> Drafter:
    draft = load_language_model(place, model.dtype, model.device)
    if getattr(draft.config, "pard_token", None) is not None:
        raise ValueError(
            f"{place} is a PARD draft model (its config names pard_token), which drafts all tokens in one "
            "pass; this is not supported. As a draft model that drafts token by token, load it with "
            "transformers and pass DraftModelDrafter(model)"
        )
    if is_assistant(draft):
        return AssistantDrafter(draft)
    own = str(model.config._name_or_path)
    if tokenizer is None and own:
        tokenizer = _tokenizer_in(own)
    of_draft = _tokenizer_in(place)
    if tokenizer is None or of_draft is None:
        return DraftModelDrafter(draft)
    return DraftModelDrafter(draft, tokenizer=of_draft, target_tokenizer=tokenizer)


def _of_draft_model(model: PreTrainedModel) -> Drafter:
    return AssistantDrafter(model) if is_assistant(model) else DraftModelDrafter(model)


def _tokenizer_in(place: str) -> Any:
    try:
        return load_tokenizer(place)
    except (OSError, ValueError):
        return None


def _of_head(head: DraftHead | MedusaHeads | MtpHeads) -> Drafter:
    if isinstance(head, DraftHead):
        return HeadDrafter(head)
    if isinstance(head, MtpHeads):
        return MtpDrafter(head)
    from specdec_ext.drafters.heads.medusa import MedusaDrafter

    return MedusaDrafter(head)
