"""Checks of the arguments of a request, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.keyword_table import CONFIG
from specdec_ext.keywords import check_arguments, check_config
from specdec_ext.models.context_limit import max_positions
from specdec_ext.pretrained import vocab_size

# Arguments of a request, next to the fields of GenerationConfig: those of ``generate`` for one row.
_ARGUMENTS = {
    *("drafter", "speculation", "verification", "graphs"),
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
}
# Fields of GenerationConfig that decide what ``generate`` returns, which an engine does itself.
_OUTPUTS = {
    *("num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits"),
    *("output_hidden_states", "output_attentions", "prefill_chunk_size"),
}
_DEFAULT_LENGTH = 8192


def check_sizes(least: int = 1, **sizes: int | None) -> None:
    """Raise ValueError for a size that is less than ``least``; None is allowed."""
    for name, value in sizes.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def longest_text(model: PreTrainedModel) -> int:
    """The most tokens of a text, unless the caller says: as many as the model has positions, if it says."""
    return max_positions(model.config.get_text_config(decoder=True)) or _DEFAULT_LENGTH


def checked_ids(model: PreTrainedModel, input_ids: Sequence[int] | Tensor) -> Tensor:
    """``[1, length]`` ids on the device of the model.

    Raises:
        ValueError: they are not one row of ids that the model has.
    """
    ids = input_ids if isinstance(input_ids, Tensor) else torch.tensor(input_ids, device="cpu")
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or len(ids) != 1 or not ids.numel() or ids.is_floating_point():
        raise ValueError(
            f"input_ids has shape {tuple(ids.shape)} and type {ids.dtype}; expected a list of ids, or ids of "
            "shape [1, length], with at least one id"
        )
    least, largest, size = int(ids.min()), int(ids.max()), vocab_size(model)
    if least < 0 or largest >= size:
        raise ValueError(
            f"input_ids has the id {least if least < 0 else largest}; expected ids in [0, {size}), the "
            "vocabulary of the model"
        )
    return ids.long().to(model.device)


def check_request(model: PreTrainedModel, logprobs: int | None, arguments: dict[str, Any]) -> None:
    """Check the other arguments of a request.

    Raises:
        ValueError: an argument is not one of a request, or ``max_new_tokens`` is missing or not valid.
    """
    size = vocab_size(model)
    if logprobs is not None and not 0 <= logprobs <= size:
        raise ValueError(
            f"logprobs must be in [0, {size}], the size of the vocabulary, got {logprobs}"
        )
    for name in arguments:
        if name in _OUTPUTS or name not in CONFIG.keys() | _ARGUMENTS:
            raise ValueError(
                f"{name} is not an argument of a request; expected one that specdec_ext.generate has for a "
                "single row and that does not change what it returns"
            )
    check_arguments(arguments)
    if arguments.get("generation_config") is not None:
        check_config(arguments["generation_config"])
    new = setting(model, "max_new_tokens", arguments)
    if isinstance(new, bool) or not isinstance(new, int) or new < 1:
        raise ValueError(f"max_new_tokens is {new!r}; a request needs an int that is at least 1")


def setting(model: PreTrainedModel, name: str, arguments: dict[str, Any]) -> Any:
    """A field of the request's generation config, as transformers finds it."""
    if name in arguments:
        return arguments[name]
    given = getattr(arguments.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if given is None else given
