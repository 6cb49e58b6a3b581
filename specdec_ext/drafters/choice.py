"""The choice of a call's drafter, from ``drafter=`` and from transformers' keywords for assisted decoding.

Transformers has keywords for a draft model, for prompt lookup and for MTP heads. They choose and configure
the drafter if ``drafter=`` leaves it open. None of them can change the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from specdec_ext.drafters import Drafter, DraftModelDrafter, NgramDrafter
from specdec_ext.drafters.heads.assistant import AssistantDrafter, is_assistant
from specdec_ext.drafters.resolve import MTP, checked_drafter, resolve_drafter
from specdec_ext.keyword_table import CONFIG
from specdec_ext.tree.config import TreeConfig

_LOOKUP = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
# Keyword -> the corresponding argument of DraftModelDrafter.
_ASSISTANT = {
    "num_assistant_tokens": "num_draft_tokens",
    "assistant_confidence_threshold": "min_confidence",
}


@dataclass(frozen=True)
class Assistant:
    """``assistant_model``, with both tokenizers if the models have different ones."""

    model: PreTrainedModel
    tokenizer: Any = None
    target_tokenizer: Any = None

    def drafter(self, config: GenerationConfig) -> Drafter:
        """The drafter, configured by the call's keywords, else by the assistant's ``generation_config``.

        Raises:
            ValueError: the assistant attends to the target's keys, and an argument is for other draft models.
        """
        if is_assistant(self.model):
            return self._sharing_keys(config)
        shape = {}
        for source in (self.model.generation_config, config):
            for name in _asked(source, _ASSISTANT):
                shape[_ASSISTANT[name]] = getattr(source, name)
        return DraftModelDrafter(
            self.model, tokenizer=self.tokenizer, target_tokenizer=self.target_tokenizer, **shape
        )

    def _sharing_keys(self, config: GenerationConfig) -> AssistantDrafter:
        name = type(self.model).__name__
        if self.tokenizer is not None:
            raise ValueError(
                f"{name} has the vocabulary of its target; leave assistant_tokenizer out"
            )
        length, confidence = _ASSISTANT
        asked = _asked(config, _ASSISTANT)
        if confidence in asked:
            raise ValueError(
                f"{confidence}={getattr(config, confidence)!r} has no effect on drafts of {name}; leave "
                "it out"
            )
        tree = TreeConfig(depth=getattr(config, length)) if length in asked else None
        return AssistantDrafter(self.model, tree)


class DrafterChoice:
    """Chooses the drafter of a call as soon as the call's config is known.

    Args:
        drafter: as in :func:`specdec_ext.generate`, or an :class:`Assistant`.
        tokenizer: the target's tokenizer, if the caller passed one.

    Attributes:
        explicit: whether the caller named a drafter other than "auto".

    Raises:
        ValueError, TypeError: as :func:`checked_drafter`.
    """

    def __init__(self, drafter: Any, tokenizer: Any = None):
        self.explicit = not (isinstance(drafter, str) and drafter == "auto")
        given = isinstance(drafter, Assistant)
        self._drafter: Any = drafter if given else checked_drafter(drafter)
        self._tokenizer = tokenizer

    def drafter(self, model: PreTrainedModel, config: GenerationConfig) -> Drafter | None:
        """The drafter for one call on ``model``.

        Raises:
            ValueError: if keywords request another drafter than ``drafter=``.
            ValueError, OSError: as :func:`resolve_drafter`.
        """
        lookup, shape = _asked(config, _LOOKUP), _asked(config, _ASSISTANT)
        uses_mtp = bool(getattr(config, "use_mtp", False))
        if lookup and self.explicit:
            raise ValueError(
                f"{lookup[0]}={getattr(config, lookup[0])!r} requests n-gram drafts, and drafter=... "
                "requests others; pass one of them, or "
                "drafter=NgramDrafter(num_draft_tokens=..., max_ngram=...)"
            )
        if uses_mtp and (self.explicit or lookup):
            other = f"{lookup[0]}={getattr(config, lookup[0])!r}" if lookup else "drafter=..."
            raise ValueError(
                f"use_mtp=True requests drafts by the checkpoint's MTP heads, and {other} requests others; "
                "pass one of them"
            )
        if isinstance(self._drafter, Assistant):
            return self._drafter.drafter(config)
        if shape:
            raise ValueError(
                f"{shape[0]}={getattr(config, shape[0])!r} configures assistant_model, which is missing; use "
                f"drafter=DraftModelDrafter(model, {_ASSISTANT[shape[0]]}=...), or leave it out"
            )
        if lookup:
            return _lookup_drafter(config)
        drafter = MTP if uses_mtp else self._drafter
        return resolve_drafter(drafter, model, self._tokenizer)


def _asked(config: GenerationConfig, names: Any) -> list[str]:
    """The keywords among ``names`` that are set to a value with an effect."""
    return [name for name in names if getattr(config, name, None) not in CONFIG[name].harmless]


def _lookup_drafter(config: GenerationConfig) -> NgramDrafter:
    arguments = {}
    if config.prompt_lookup_num_tokens is not None:
        arguments["num_draft_tokens"] = config.prompt_lookup_num_tokens
    if config.max_matching_ngram_size is not None:
        size = config.max_matching_ngram_size
        arguments.update(max_ngram=size, min_ngram=min(2, size))
    return NgramDrafter(**arguments)
