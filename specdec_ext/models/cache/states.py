"""Recurrent and convolution states: memory of fixed size that can't be cut, only saved and restored.

A token can't be removed from a state. If not all drafts of a row were accepted, its states are restored to
those before the pass, and its accepted tokens are read again before its next drafts (``slots/replay.py``).
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
        layers: the layers of the cache that have states.
    """

    def __init__(self, layers: Sequence[LinearAttentionCacheLayerMixin]):
        self._layers = list(layers)
        self._saved: list[Tensor] = []
        self._retired: list[Tensor] = []  # states of the rows that ended

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def filled(self) -> bool:
        """Whether the states have read any token yet."""
        return any(any(layer.has_previous_state.values()) for layer in self._layers)

    @property
    def num_bytes(self) -> int:
        """Memory of the states that exist, in bytes."""
        return sum(store[index].nbytes for store, index in self._places())

    def _places(self) -> Iterator[tuple[dict[int, Any], int]]:
        for layer in self._layers:
            for store in (layer.conv_states, layer.recurrent_states):
                for index, state in store.items():
                    if state is not None:
                        yield store, index

    def branch(self, origins: Tensor) -> None:
        """Save the states, and make row i a copy of row ``origins[i]``."""
        self._saved = []
        for store, index in self._places():
            self._saved.append(store[index])
            store[index] = store[index].index_select(0, origins.to(store[index].device))

    def join(self, rows: Tensor, kept: Tensor) -> None:
        """Set row i to branch ``rows[i]`` if ``kept[i]``, else to its state before :meth:`branch`."""
        saved, self._saved = self._saved, []
        to = kept.nonzero().flatten()
        for (store, index), state in zip(self._places(), saved, strict=True):
            if len(to):
                branches = rows[to].to(state.device)
                state[to.to(state.device)] = store[index][branches]
            store[index] = state

    def reorder(self, order: Sequence[int], active: int) -> None:
        """Move row ``order[i]`` to row i; the first ``active`` rows continue.

        A model expects states of exactly the rows that it runs, so those of ended rows are kept separately.
        """
        retired, self._retired = self._retired, []
        for i, (store, index) in enumerate(self._places()):
            rows = torch.cat([store[index], retired[i]]) if retired else store[index]
            rows = rows[torch.tensor(order, device=rows.device)]
            store[index] = rows[:active]
            self._retired.append(rows[active:])

    def release(self) -> None:
        """Turn the states into ordinary tensors outside of inference mode, which the caller may write to."""
        with inference_mode(False):
            for store, index in self._places():
                store[index] = store[index].clone()
