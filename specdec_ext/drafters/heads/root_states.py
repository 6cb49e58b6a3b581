"""``RootStates``: the target's hidden state of the token before each row's root."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext.context import Context
from specdec_ext.models import TargetOutput
from specdec_ext.verify.sampler import Accepted


class RootStates:
    """The states that a drafter reads which records one layer and keeps nothing else of the text."""

    def __init__(self) -> None:
        # Rows of the last step, states of all its nodes, and the node before each row's root; then the same
        # of the prompts of rows that have joined since. The states are selected by the next draft, if there
        # is one.
        self._latest: list[tuple[Sequence[int], Tensor, Tensor | Accepted]] = []

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        """Keep the states of prompts; the arguments are those of :meth:`specdec_ext.Drafter.join`."""
        if not rows:
            return
        states = output.aux_hidden_states[0]
        columns = context.last_columns(states.shape[1])
        last = torch.tensor([columns[row] for row in rows], dtype=torch.long, device="cpu")
        self._latest.append((rows, states, last))

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """Keep the states of a step; the arguments are those of :meth:`specdec_ext.Drafter.commit`."""
        self._latest = [(context.rows, output.aux_hidden_states[0], accepted)]

    def of_rows(self, rows: list[int]) -> Tensor:
        """``[rows, hidden]``, the states before the roots of these rows."""
        kept = [row for part, _, _ in self._latest for row in part]
        states = torch.cat([_selected(states, nodes) for _, states, nodes in self._latest])
        if kept == rows:
            return states
        # A row that has joined since has the number of a row that has ended.
        places = {row: i for i, row in enumerate(kept)}
        return states[[places[row] for row in rows]]


def _selected(states: Tensor, nodes: Tensor | Accepted) -> Tensor:
    """``[rows, hidden]``, the states of one node of each row."""
    if isinstance(nodes, Accepted):
        nodes = nodes.path.gather(1, nodes.num_accepted[:, None])[:, 0]
    nodes = nodes.to(states.device)
    return states[torch.arange(len(states), device=nodes.device), nodes]
