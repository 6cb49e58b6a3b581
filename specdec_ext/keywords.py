"""What a call's keywords may be, and where its processors are called: the table, enforced.

What the table lacks is refused by name when it is set: nothing of a newer transformers is ignored in silence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import logits_process, stopping_criteria

from specdec_ext.keyword_table import ARGUMENTS, CONFIG, PARTS, Keyword, Reads, Verdict


def reads_of(part: Any) -> Reads:
    """What a processor or criterion depends on; a class of the user's, or a subclass, may depend on anything.

    Raises:
        ValueError: for one that can't be served.
    """
    known = type(part).__module__ in (logits_process.__name__, stopping_criteria.__name__)
    keyword = PARTS.get(type(part).__name__) if known else None
    if keyword is None:
        return Reads.ORDER
    if keyword.reads is None:
        raise ValueError(f"{type(part).__name__} is not supported: {keyword.note}; leave it out")
    return keyword.reads


def check_config(config: GenerationConfig) -> None:
    """Refuse what ``config`` asks for and can't be had.

    Raises:
        ValueError: naming the field, its value and the way out.
    """
    for name, keyword in CONFIG.items():
        if keyword.verdict is Verdict.REFUSED:
            _check(name, getattr(config, name, None), keyword)
    for name, default in _unlisted_fields().items():
        _check_unlisted(name, getattr(config, name), default)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """The same for keywords of ``generate``, which may be fields of the config.

    transformers acts on some before it calls us: what is refused anyway is refused here, in our words.
    """
    for name, value in arguments.items():
        keyword = ARGUMENTS.get(name) or CONFIG.get(name)
        if keyword is not None and keyword.verdict is Verdict.REFUSED:
            _check(name, value, keyword)
        elif name in _unlisted_parameters():
            _check_unlisted(name, value, None)


def _check(name: str, value: Any, keyword: Keyword) -> None:
    if value not in keyword.harmless:
        raise ValueError(f"{name}={value!r} can't be combined with speculation: {keyword.note}")


def _check_unlisted(name: str, value: Any, default: Any) -> None:
    if value is not None and value != default:
        raise ValueError(
            f"{name}={value!r} is a keyword of transformers {transformers.__version__} that this version of "
            "specdec_ext doesn't know, so it can't promise the same text; leave it out, or use model.generate"
        )


@functools.cache
def _unlisted_fields() -> dict[str, Any]:
    """Fields of the installed ``GenerationConfig`` that the table lacks, and their defaults."""
    defaults = {**vars(GenerationConfig()), **GenerationConfig._get_default_generation_params()}
    return {
        name: value
        for name, value in defaults.items()
        if name not in CONFIG and not name.startswith("_")
    }


@functools.cache
def _unlisted_parameters() -> frozenset[str]:
    named = inspect.signature(GenerationMixin.generate).parameters
    return frozenset(named) - set(ARGUMENTS) - {"self"}
