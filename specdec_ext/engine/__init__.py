"""An engine that decodes requests which arrive and leave at any time."""

from specdec_ext.engine.engine import Engine, EngineLoad
from specdec_ext.engine.handle import Burst, FinishReason, Handle, Times, TokenLogprobs

__all__ = ["Burst", "Engine", "EngineLoad", "FinishReason", "Handle", "Times", "TokenLogprobs"]
