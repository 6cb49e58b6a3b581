"""A whole language model from a folder or the hub: a target or a draft model, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec_ext.heads.checkpoints.hub import on_disk
from specdec_ext.heads.checkpoints.load import is_draft


def load_language_model(
    name: str | Path, dtype: torch.dtype | str, device: torch.device | str
) -> PreTrainedModel:
    """A causal language model in eval mode.

    Args:
        name: folder or hub id.
        dtype: of weights and activations; "auto" for the checkpoint's own.
        device: to put it on.

    Raises:
        OSError: for a path with nothing behind it, or a hub id that is not on disk where the hub does not
            answer.
        ValueError: for a draft head, a checkpoint without all weights, or one that transformers can't load.
    """
    place = on_disk(name) or name
    if isinstance(place, Path) and _is_head(place):
        raise ValueError(
            f"{name} is a draft head and no language model; name the model that it was made for here, "
            "and the head as the drafter"
        )
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, found = load(place, dtype=dtype, output_loading_info=True)
    except Exception as error:  # whatever transformers makes of a config that it does not know
        raise ValueError(
            f"{name} can't be loaded as a causal language model: {_in_short(error)}"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{name} lacks {len(missing)} weights of a {type(model).__name__}, such as {missing[0]}, "
            "which would be random; is it a draft head or another part of a model?"
        )
    ready: PreTrainedModel = model.to(device).eval()
    return ready


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer in a folder or hub repository.

    Raises:
        OSError: as :func:`load_language_model`.
        ValueError: if it has no tokenizer that transformers can load.
    """
    place = on_disk(name) or name
    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # whatever transformers makes of the files
        raise ValueError(
            f"{name} has no tokenizer that transformers can load: {_in_short(error)}"
        ) from error


def _in_short(error: Exception) -> str:
    """Type and first sentence."""
    first = str(error).strip().partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {first}"


def _is_head(folder: str | Path) -> bool:
    try:
        return is_draft(folder)
    except (OSError, ValueError):
        return False  # nothing that we read; transformers says what is wrong with it
