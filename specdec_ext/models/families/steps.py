"""Time steps of state space models (Mamba-2), which transformers clamps only in passes of several tokens.

A decoding pass over one token does not clamp them. If the clamp has an effect (Nemotron-H), the tokens of a
block would get other results than in passes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec_ext.models.passes.visibility import current_block
from specdec_ext.models.patching.arguments import with_attributes
from specdec_ext.models.patching.forwards import Replacement

_UNLIMITED = (0.0, math.inf)


def steps_of(model: PreTrainedModel) -> list[Replacement]:
    """Return the patch that removes the clamp in blocks; none for models whose clamp has no effect."""
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
    return type(mixer).forward(with_attributes(mixer, time_step_limit=_UNLIMITED), *args, **kwargs)
