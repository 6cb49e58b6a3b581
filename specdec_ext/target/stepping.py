"""Mamba-1 mixers, one token at a time.

transformers' selective scan takes no initial state: of a pass over several tokens after cached ones a Mamba-1
mixer forgets the state without a word, while over a single token it is right. So the mixers step through the
tokens of a block; everything between them (projections of the other layers, MLPs, attention) still computes
the block at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from specdec_ext.target.replaced import replaced_forward


def stateless_scans(model: nn.Module) -> list[nn.Module]:
    """The mixers of a model that must step: selective scans as of Mamba (arXiv 2312.00752, section 3).

    What tells them from Mamba-2's, whose scan takes an initial state, is that ``dt``, ``B`` and ``C`` are
    projected from the convolved input (``x_proj``).
    """
    return [
        module
        for module in model.modules()
        if hasattr(module, "A_log")
        and (hasattr(module, "x_proj") or hasattr(module, "x_proj_weight"))
    ]


def stepping(mixers: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Let these modules read the tokens of a pass one after another, in this thread."""
    return replaced_forward(mixers, _step)


def _step(
    mixer: nn.Module,
    forward: Callable[..., Tensor],
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    steps = hidden_states.split(1, dim=1)
    return torch.cat([forward(step, *args, **kwargs) for step in steps], dim=1)
