"""Checks of a call's keywords against :mod:`specdec_ext.keyword_table`.

A keyword that is missing in the table raises an error as soon as it is set, so no keyword of a newer
transformers is ignored silently. The arguments that only this package has (``drafter``, ``seed``, ...) are
checked in :mod:`specdec_ext.generation`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import logits_process, stopping_criteria

from specdec_ext.errors import NotAcceleratedError
from specdec_ext.keyword_table import ARGUMENTS, CONFIG, PARTS, Keyword, Reads, Verdict


def reads_of(part: Any) -> Reads:
    """What a processor or criterion depends on.

    A class that transformers does not define says so itself, with an attribute ``reads``; without it, it may
    read anything.

    Raises:
        ValueError: for a processor that is not supported.
    """
    known = type(part).__module__ in (logits_process.__name__, stopping_criteria.__name__)
    keyword = PARTS.get(type(part).__name__) if known else None
    if keyword is None:
        declared = getattr(part, "reads", None)
        return declared if isinstance(declared, Reads) else Reads.ORDER
    if keyword.reads is None:
        raise ValueError(f"{type(part).__name__} is not supported: {keyword.note}; leave it out")
    return keyword.reads


def check_config(config: GenerationConfig) -> None:
    """Refuse fields of ``config`` that can't be honoured.

    Raises:
        ValueError: the message names the field, its value and a way out.
    """
    for name, keyword in CONFIG.items():
        if keyword.verdict is Verdict.REFUSED:
            _check(name, getattr(config, name, None), keyword)
    for name, default in _unlisted_fields().items():
        _check_unlisted(name, getattr(config, name), default)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of ``generate`` that can't be honoured; they may be fields of the config, too.

    Transformers acts on some arguments before it calls our loop. Checking here first gives our messages.
    """
    for name, value in arguments.items():
        keyword = ARGUMENTS.get(name) or CONFIG.get(name)
        if keyword is not None and keyword.verdict is Verdict.REFUSED:
            _check(name, value, keyword)
        elif name in _unlisted_parameters():
            _check_unlisted(name, value, None)


def _check(name: str, value: Any, keyword: Keyword) -> None:
    if value not in keyword.harmless:
        error = NotAcceleratedError if keyword.in_transformers else ValueError
        raise error(f"{name}={value!r} can't be combined with speculation: {keyword.note}")


def _check_unlisted(name: str, value: Any, default: Any) -> None:
    if value is not None and value != default:
        raise NotAcceleratedError(
            f"{name}={value!r} is a keyword of transformers {transformers.__version__} that this version of "
            "specdec_ext doesn't know, so the text might change; leave it out, or use model.generate"
        )


@functools.cache
def _unlisted_fields() -> dict[str, Any]:
    """Fields of the installed ``GenerationConfig`` that are missing in the table -> their defaults."""
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
