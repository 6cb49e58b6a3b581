"""``RootStates``: the target's hidden state of the token before each row's root."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.context import Context
from specdec_ext.models import TargetOutput
from specdec_ext.verify.sampler import Accepted


class RootStates:
    """The states that a drafter reads which records one layer and keeps nothing else of the text.

    Args:
        context: of the call.
        output: of the prompt.
    """

    def __init__(self, context: Context, output: TargetOutput):
        columns = context.last_columns(output.aux_hidden_states[0].shape[1])
        # Rows of the last step, states of all its nodes, and the node before each row's root. The states are
        # selected by the next draft, if there is one.
        self._latest: tuple[list[int], Tensor, Tensor | Accepted] = (
            context.rows,
            output.aux_hidden_states[0],
            torch.tensor(columns, device="cpu"),
        )

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """Keep the states of a step; the arguments are those of :meth:`specdec_ext.Drafter.commit`."""
        self._latest = context.rows, output.aux_hidden_states[0], accepted

    def of_rows(self, rows: list[int]) -> Tensor:
        """``[rows, hidden]``, the states before the roots of these rows."""
        kept, states, nodes = self._latest
        if isinstance(nodes, Accepted):
            nodes = nodes.path.gather(1, nodes.num_accepted[:, None])[:, 0]
        nodes = nodes.to(states.device)
        states = states[torch.arange(len(kept), device=nodes.device), nodes]
        return states if kept == rows else states[[kept.index(row) for row in rows]]
