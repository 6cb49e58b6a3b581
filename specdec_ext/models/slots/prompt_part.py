"""``PromptPart``: what a target has computed for consecutive tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class PromptPart:
    """What a target has computed for consecutive tokens of a prompt of one row, without padding.

    A target of the same model would compute it again from the same tokens after the same tokens.

    Attributes:
        num_tokens: number of tokens.
        layers: all layers of the cache, empty.
        slots: for each layer, what :meth:`RollbackLayer.read` returns.
        aux_hidden_states: ``[1, num_tokens, width]`` for each recorded layer
            (:meth:`Target.record_hidden_states`).
    """

    num_tokens: int
    layers: Sequence[Any]
    slots: Sequence[Sequence[Tensor]]
    aux_hidden_states: Sequence[Tensor]
