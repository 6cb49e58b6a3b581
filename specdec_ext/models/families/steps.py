"""Time steps of state space models (Mamba-2), which transformers clamps in passes of several tokens alone.

A decoding step of one token runs without the clamp. Where it is not a formality (Nemotron-H), the tokens of a
block would not read what they read in passes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec_ext.models.passes.masks import current_block
from specdec_ext.models.patching.arguments import twin
from specdec_ext.models.patching.forwards import Replacement

_UNLIMITED = (0.0, math.inf)


def steps_of(model: PreTrainedModel) -> list[Replacement]:
    """What lets blocks take the steps of single tokens; nothing for models without limits."""
    limited = [
        module
        for module in model.modules()
        if tuple(getattr(module, "time_step_limit", _UNLIMITED)) != _UNLIMITED
    ]
    return [(limited, _without_limits)] if limited else []


def _without_limits(
    mixer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    block = current_block()
    if block is None or block.columns is None:  # the prompt
        return forward(*args, **kwargs)
    return type(mixer).forward(twin(mixer, time_step_limit=_UNLIMITED), *args, **kwargs)
