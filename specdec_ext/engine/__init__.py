"""Engines decode requests that arrive and leave at any time: in one batch, or one after another."""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

from transformers import PreTrainedModel

from specdec_ext.engine.engine import Engine
from specdec_ext.engine.handle import Burst, FinishReason, Handle, Times, TokenLogprobs
from specdec_ext.engine.load import EngineLoad
from specdec_ext.engine.serial import SerialEngine
from specdec_ext.errors import CantJoinError

AnyEngine: TypeAlias = Engine | SerialEngine

__all__ = [
    "AnyEngine",
    "Burst",
    "Engine",
    "EngineLoad",
    "FinishReason",
    "Handle",
    "SerialEngine",
    "Times",
    "TokenLogprobs",
    "make_engine",
]

_log = logging.getLogger(__name__)


def make_engine(model: PreTrainedModel, **options: Any) -> AnyEngine:
    """An :class:`Engine`; for a model or drafter whose requests can't join a batch a :class:`SerialEngine`.

    The latter is logged with its reason.

    Args:
        model: the target.
        **options: the arguments of both.
    """
    try:
        return Engine(model, **options)
    except CantJoinError as reason:
        _log.warning("requests are decoded one after another: %s", reason)
        return SerialEngine(model, **options)
