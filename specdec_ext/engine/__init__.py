"""An engine that decodes requests which arrive and leave at any time, in one batch."""

from specdec_ext.engine.engine import Engine, EngineClosedError, EngineFullError, EngineLoad
from specdec_ext.engine.handle import Burst, FinishReason, Handle, Times, TokenLogprobs

__all__ = [
    "Burst",
    "Engine",
    "EngineClosedError",
    "EngineFullError",
    "EngineLoad",
    "FinishReason",
    "Handle",
    "Times",
    "TokenLogprobs",
]
