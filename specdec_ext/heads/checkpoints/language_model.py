"""Load a whole language model (a target or a draft model) and its tokenizer from a folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec_ext import assets
from specdec_ext.defaults import BUNDLED
from specdec_ext.heads.checkpoints.load import is_draft
from specdec_ext.heads.checkpoints.storage.hub import on_disk
from specdec_ext.models.compat import sharing_all_keys, spread_over_processes
from specdec_ext.models.quantised.saved import METHOD  # noqa: F401  # transformers knows it now


def load_language_model(
    name: str | Path, dtype: torch.dtype | str, device: torch.device | str | None
) -> PreTrainedModel:
    """Load a causal language model and put it into eval mode.

    Args:
        name: folder or hub id.
        dtype: dtype of weights and activations; "auto" for that of the checkpoint.
        device: device of the model; None spreads its layers over the processes of ``torchrun``
            (``tp_plan="auto"``).

    Raises:
        OSError: for a path that does not exist, or a hub id that is not on disk while the hub is not
            reachable.
        ValueError: for a draft head, a checkpoint with missing weights, or one that transformers can't load.
    """
    place = on_disk(name) or name
    if isinstance(place, Path) and _is_head(place):
        raise ValueError(
            f"{name} is a draft head, not a language model; pass the model that it was trained for here, "
            "and the head as the drafter"
        )
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with sharing_all_keys():
            spread = spread_over_processes() if device is None else {}
            model, found = load(place, dtype=dtype, output_loading_info=True, **spread)
    except Exception as error:  # transformers raises many types for a config that it does not know
        raise ValueError(
            f"{name} can't be loaded as a causal language model: {_in_short(error)}"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{name} lacks {len(missing)} weights of a {type(model).__name__}, such as {missing[0]}, which "
            "would be initialised at random; it may be a draft head or only a part of a model"
        )
    ready: PreTrainedModel = model.eval() if device is None else model.to(device).eval()
    return ready


def load_with_tokenizer(
    name: str, dtype: torch.dtype | str, device: torch.device | str | None
) -> tuple[Any, Any]:
    """Load a causal language model, in eval mode, and its tokenizer.

    Args:
        name: folder or hub id, or ``"bundled"`` for the model that the package brings.
        dtype, device: as for :func:`load_language_model`.

    Raises:
        OSError, ValueError: as :func:`load_language_model` and :func:`load_tokenizer`.
    """
    place = assets.target_folder() if name == BUNDLED else name
    return load_language_model(place, dtype, device), load_tokenizer(place)


def load_tokenizer(name: str | Path) -> Any:
    """Load the tokenizer in a folder or hub repository.

    Raises:
        OSError: as in :func:`load_language_model`.
        ValueError: if there is no tokenizer that transformers can load.
    """
    place = on_disk(name) or name
    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # transformers raises many types for damaged files
        raise ValueError(
            f"{name} has no tokenizer that transformers can load: {_in_short(error)}"
        ) from error


def _in_short(error: Exception) -> str:
    """Return the type of an error and the first sentence of its message."""
    first = str(error).strip().partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {first}"


def _is_head(folder: str | Path) -> bool:
    try:
        return is_draft(folder)
    except (OSError, ValueError):
        return False  # not readable as a draft head; transformers reports what is wrong
