"""Recurrent and convolution states: fixed-size memory that can't be cut back, only saved and restored.

A layer's state has read a token or has not. So a pass whose drafts were not all accepted is undone for the
row, and what the row did accept is read again in front of its next block (``SlotTarget``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_ext.models.compat import LinearAttentionCacheLayerMixin
from specdec_ext.models.patching.changes import inference_mode


class States:
    """The states of all layers of a cache, by row.

    Args:
        layers: those of the cache that have states.
    """

    def __init__(self, layers: Sequence[LinearAttentionCacheLayerMixin]):
        self._layers = list(layers)
        self._saved: list[Tensor] = []
        self._retired: list[Tensor] = []  # rows that ended, behind the active ones

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def filled(self) -> bool:
        """Whether they have read anything yet."""
        return any(any(layer.has_previous_state.values()) for layer in self._layers)

    def _places(self) -> Iterator[tuple[dict[int, Any], int]]:
        for layer in self._layers:
            for store in (layer.conv_states, layer.recurrent_states):
                for index, state in store.items():
                    if state is not None:
                        yield store, index

    def branch(self, origins: Tensor) -> None:
        """Remember the states as they are, and let row i be a copy of row ``origins[i]``."""
        self._saved = []
        for store, index in self._places():
            self._saved.append(store[index])
            store[index] = store[index].index_select(0, origins.to(store[index].device))

    def join(self, rows: Tensor, kept: Tensor) -> None:
        """Row i becomes branch ``rows[i]`` where ``kept[i]``, else what it was before :meth:`branch`."""
        saved, self._saved = self._saved, []
        to = kept.nonzero().flatten()
        for (store, index), state in zip(self._places(), saved, strict=True):
            if len(to):
                branches = rows[to].to(state.device)
                state[to.to(state.device)] = store[index][branches]
            store[index] = state

    def reorder(self, order: Sequence[int], active: int) -> None:
        """Row i becomes what row ``order[i]`` was; the first ``active`` rows go on.

        Models hand their caches as many rows as they run, so the states of the others are kept aside.
        """
        retired, self._retired = self._retired, []
        for i, (store, index) in enumerate(self._places()):
            rows = torch.cat([store[index], retired[i]]) if retired else store[index]
            rows = rows[torch.tensor(order, device=rows.device)]
            store[index] = rows[:active]
            self._retired.append(rows[active:])

    def release(self) -> None:
        """Make them what the caller may write to: ordinary tensors, all rows in the order of the cache."""
        with inference_mode(False):
            for store, index in self._places():
                store[index] = store[index].clone()
