"""``drafter="auto"``: n-gram copies, and the draft head that the model names where they find nothing.

A model names its head in its config: ``model.config.specdec_ext_draft`` is a hub id or a folder, relative to
the model's own where that is one; ``save_pretrained`` keeps it. ``"bundled"`` is the head that comes with
this package, of the target that comes with it. Nothing is looked for anywhere else.
"""

from __future__ import annotations

import copy
from pathlib import Path
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from specdec_ext import assets
from specdec_ext.checkpoints import load_draft
from specdec_ext.drafters import Drafter, NgramDrafter, resolve_drafter
from specdec_ext.drafters.combined import CombinedDrafter

CONFIG_FIELD = "specdec_ext_draft"
BUNDLED = "bundled"

# A head is read and packed once per model. Calls draft with copies: they share the weights alone.
_of_model: WeakKeyDictionary[PreTrainedModel, tuple[str, Drafter]] = WeakKeyDictionary()


def auto_drafter(model: PreTrainedModel) -> Drafter:
    """A drafter for one call.

    Raises:
        ValueError: if the config names something that is no head, or no head for this model.
        OSError: if there is nothing where it points.
    """
    named = getattr(model.config, CONFIG_FIELD, None)
    if named is None:
        return NgramDrafter()
    if not isinstance(named, str) or not named:
        raise ValueError(
            f"model.config.{CONFIG_FIELD} is {named!r}; expected the folder or hub id of a draft head, or "
            "leave it out"
        )
    if model not in _of_model or _of_model[model][0] != named:
        _of_model[model] = (named, _load(model, named))
    return CombinedDrafter(NgramDrafter(), copy.copy(_of_model[model][1]))


def _load(model: PreTrainedModel, named: str) -> Drafter:
    if named == BUNDLED:
        drafter = resolve_drafter(assets.load_head())
    else:
        beside = Path(str(model.config._name_or_path)) / named
        drafter = resolve_drafter(load_draft(beside if beside.is_dir() else named, keep=False))
    assert drafter is not None
    drafter.feature_layers(model)  # checks the pair, and packs the weights that the copies share
    return drafter
