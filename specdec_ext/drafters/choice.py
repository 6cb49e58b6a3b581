"""Which drafter serves a call: what ``drafter=`` names, and what transformers' own keywords ask for.

transformers' assisted decoding has keywords of its own for a draft model and for prompt lookup. They choose
and shape the drafter where ``drafter=`` leaves that open; none of them can change the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from specdec_ext.drafters import Drafter, DraftModelDrafter, NgramDrafter
from specdec_ext.drafters.resolve import checked_drafter, resolve_drafter
from specdec_ext.keyword_table import CONFIG

_LOOKUP = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
# Keyword -> the argument of DraftModelDrafter that it is.
_ASSISTANT = {
    "num_assistant_tokens": "num_draft_tokens",
    "assistant_confidence_threshold": "min_confidence",
}


@dataclass(frozen=True)
class Assistant:
    """``assistant_model`` with what belongs to it; the tokenizers only where the two models' differ."""

    model: PreTrainedModel
    tokenizer: Any = None
    target_tokenizer: Any = None

    def drafter(self, config: GenerationConfig) -> DraftModelDrafter:
        """Shaped by the call's keywords, else by the ``generation_config`` of the assistant."""
        shape = {}
        for source in (self.model.generation_config, config):
            for name in _asked(source, _ASSISTANT):
                shape[_ASSISTANT[name]] = getattr(source, name)
        return DraftModelDrafter(
            self.model, tokenizer=self.tokenizer, target_tokenizer=self.target_tokenizer, **shape
        )


class DrafterChoice:
    """The drafter of a call, chosen when its config is known.

    Args:
        drafter: as in :func:`specdec_ext.generate`, or an :class:`Assistant`.
        tokenizer: of the target, if the caller gave one.

    Attributes:
        explicit: whether the caller named the drafter.

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
            ValueError: if keywords ask for another drafter than the one that was named.
            ValueError, OSError: as :func:`resolve_drafter`.
        """
        lookup, shape = _asked(config, _LOOKUP), _asked(config, _ASSISTANT)
        if lookup and self.explicit:
            raise ValueError(
                f"{lookup[0]}={getattr(config, lookup[0])!r} asks for n-gram drafts and drafter for others; "
                "pass one of them, or drafter=NgramDrafter(num_draft_tokens=..., max_ngram=...)"
            )
        if isinstance(self._drafter, Assistant):
            return self._drafter.drafter(config)
        if shape:
            raise ValueError(
                f"{shape[0]}={getattr(config, shape[0])!r} shapes the drafts of assistant_model, and there "
                f"is none; use DraftModelDrafter(model, {_ASSISTANT[shape[0]]}=...), or leave it out"
            )
        if lookup:
            return _lookup_drafter(config)
        return resolve_drafter(self._drafter, model, self._tokenizer)


def _asked(config: GenerationConfig, names: Any) -> list[str]:
    """Those of the keywords that ask for something; transformers' defaults ask for nothing."""
    return [name for name in names if getattr(config, name, None) not in CONFIG[name].harmless]


def _lookup_drafter(config: GenerationConfig) -> NgramDrafter:
    arguments = {}
    if config.prompt_lookup_num_tokens is not None:
        arguments["num_draft_tokens"] = config.prompt_lookup_num_tokens
    if config.max_matching_ngram_size is not None:
        size = config.max_matching_ngram_size
        arguments.update(max_ngram=size, min_ngram=min(2, size))
    return NgramDrafter(**arguments)
