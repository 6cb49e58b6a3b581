"""The state of a draft head: its key-value cache, and the pending elements that it has not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ext.heads.config import HeadConfig
from specdec_ext.heads.rope import rope_tables
from specdec_ext.models.base import CommittedRound
from specdec_ext.models.passes.hidden_states import LayerStates
from specdec_ext.verify.sampler import Accepted

# Caches and tables grow by at least this many entries, so that they are rarely copied.
STEP = 1024


@dataclass
class PendingFeatures:
    """Committed text of some rows that the head has not read yet, with the target's features.

    An element of a row is the pair (token, features of the token before it).

    Attributes:
        rows: original row numbers.
        tokens: the tokens of each row's elements.
        aux_hidden_states: ``[rows, new, width]`` each; concatenated, they are the features. Columns after a
            row's elements are arbitrary.
        committed: the round that these are the elements of, if it was committed on the device, as the latest
            one.
        order: ``[rows, new]``, the columns of ``aux_hidden_states`` that hold the elements; None for 0, 1,
            ... They are gathered only when the features are read.
    """

    rows: list[int]
    tokens: list[list[int]]
    aux_hidden_states: Sequence[Tensor]
    order: Tensor | None = None
    committed: CommittedRound | None = None

    @property
    def features(self) -> Tensor:
        """The features, ``[rows, new, width]``."""
        states = self.aux_hidden_states
        if self.order is not None:
            states = [at_columns(state, self.order) for state in states]
        return torch.cat(list(states), dim=-1) if len(states) > 1 else states[0]

    @property
    def counts(self) -> list[int]:
        """Number of elements of each row."""
        return [len(row) for row in self.tokens]

    @property
    def even(self) -> bool:
        """Whether every column of ``aux_hidden_states`` is an element of every row, in order."""
        width = self.aux_hidden_states[0].shape[1]
        return self.order is None and all(count == width for count in self.counts)


class Step(NamedTuple):
    """A step whose hidden states are kept: little more than references, because most steps keep it.

    Attributes:
        rows: original row numbers.
        emitted: the emitted tokens of each row.
        aux_hidden_states: of all nodes, ``[rows, nodes, width]`` each.
        accepted: the accepted nodes; None for a step without drafts.
        committed: the round on the device, if it was committed there.
    """

    rows: list[int]
    emitted: list[list[int]]
    aux_hidden_states: Sequence[Tensor]
    accepted: Accepted | None
    committed: CommittedRound | None

    @classmethod
    def of(cls, rows: list[int], accepted: Accepted, states: Sequence[Tensor]) -> Step:
        drafted = accepted if accepted.path.shape[1] > 1 else None
        return cls(rows, accepted.emitted, states, drafted, accepted.committed)

    def latest(self) -> PendingFeatures | None:
        """The elements of a round that was committed on the device, or None. No round has been since."""
        committed = self.committed
        if committed is None or committed.new_features is None:
            return None
        new = committed.new_features[:, : max(map(len, self.emitted))]
        return PendingFeatures(self.rows, self.emitted, [new], committed=committed)

    def elements(self) -> PendingFeatures:
        """The emitted tokens with the features of the tokens before them."""
        tokens, states = self.emitted, self.aux_hidden_states
        width = max(map(len, tokens))
        if self.accepted is not None:
            # The path of a chain or of a tree's first branch is nodes 0, 1, 2, ..., which need no gather.
            visited = zip(self.accepted.paths, tokens, strict=True)
            if any(nodes[: len(row)] != [*range(len(row))] for nodes, row in visited):
                nodes = self.accepted.path[:, :width].clamp(min=0)
                states = [at_columns(state, nodes) for state in states]
            elif isinstance(states, LayerStates):
                states = states.first(width)
            else:
                states = [state[:, :width] for state in states]
        return PendingFeatures(self.rows, tokens, states)


def at_columns(state: Tensor, columns: Tensor) -> Tensor:
    """``[rows, n, hidden]``, the values of ``state`` in these ``columns [rows, n]``."""
    return state.gather(1, columns[..., None].expand(-1, -1, state.shape[2]))


def of_active_rows(
    pending: Sequence[PendingFeatures], active: list[int], num_rows: int
) -> PendingFeatures:
    """Join the elements of several steps, for all rows of the batch; ended rows get none."""
    runs = [_joined(list(run)) for _, run in groupby(pending, _kind)]
    everyone = list(range(num_rows))
    if len(runs) == 1 and runs[0].rows == active == everyone:
        return runs[0]
    tokens: list[list[int]] = [[] for _ in everyone]
    pieces: list[list[Tensor]] = [[] for _ in everyone]
    for part in runs:
        for i, (row, new) in enumerate(zip(part.rows, part.tokens, strict=True)):
            if row in active:
                tokens[row] += new
                pieces[row].append(part.features[i, : len(new)])
    longest, like = max(map(len, tokens)), runs[0].features
    features = like.new_zeros(num_rows, longest, like.shape[2])
    for row, parts in enumerate(pieces):
        if parts:
            features[row, : len(tokens[row])] = torch.cat(parts)
    return PendingFeatures(everyone, tokens, [features])


def _kind(part: PendingFeatures) -> tuple[Any, ...]:
    """A key that is equal for steps that can be concatenated: those with the same rows that are ``even``."""
    return part.rows, len(part.aux_hidden_states), part.even or id(part)


def _joined(parts: list[PendingFeatures]) -> PendingFeatures:
    """Concatenate parts of one kind; the result has a single tensor of features."""
    first = parts[0]
    if len(parts) == 1:
        return PendingFeatures(first.rows, first.tokens, [first.features])
    tokens = [list(chain(*new)) for new in zip(*(part.tokens for part in parts), strict=True)]
    states = [part.aux_hidden_states for part in parts]
    passes = [each for each in states if isinstance(each, LayerStates)]
    joined: Sequence[Tensor]
    if len(passes) == len(states):
        joined = LayerStates.joined(passes)
    else:
        joined = [torch.cat(each, dim=1) for each in zip(*states, strict=True)]
    return PendingFeatures(first.rows, tokens, [torch.cat(list(joined), dim=-1)])


class HeadCache:
    """The keys and values of all rows of a call, and the rope tables.

    Rows keep their places when others end; a row without new elements costs nothing.

    Attributes:
        keys, values: ``[layers, rows, kv_heads, capacity, head_dim]``.
        cosines, sines: ``[positions, rotary / 2]`` float32.
        lengths: number of elements of each row.
        on_device: ``[2, rows]``, lengths and positions of the next elements; None before the first draft.
        first_positions: position of each row's first element. It is not 0 if the caller's cache held earlier
            text, whose features are unknown.
    """

    def __init__(
        self,
        config: HeadConfig,
        first_positions: list[int],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._config = config
        self.lengths = [0] * len(first_positions)
        self.first_positions = first_positions
        self.on_device: Tensor | None = None
        size = config.num_layers, len(first_positions), config.num_kv_heads, 0, config.head_dim
        self.keys = torch.empty(size, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.cosines = self.sines = torch.empty(0, device=device)

    def reserve(self, new: Sequence[int], room: int, depth: int) -> None:
        """Make room for ``new`` elements per row and a draft of ``room`` slots and ``depth`` positions."""
        filled = [length + count for length, count in zip(self.lengths, new, strict=True)]
        slots = max(filled) + room
        if slots > self.keys.shape[3]:
            used = max(self.lengths)
            self.keys, self.values = (
                _grown(buffer, used, slots + STEP) for buffer in (self.keys, self.values)
            )
        ends = [first + slot for first, slot in zip(self.first_positions, filled, strict=True)]
        positions = max(ends) + depth
        if positions > len(self.cosines):
            tables = rope_tables(self._config, positions + STEP)
            self.cosines, self.sines = (table.to(self.keys.device) for table in tables)

    def count(self, new: Sequence[int]) -> None:
        """Note on the host how many elements of each row were added."""
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]

    def positions(self) -> list[int]:
        """Position of each row's next element."""
        return [a + b for a, b in zip(self.first_positions, self.lengths, strict=True)]


def _grown(buffer: Tensor, used: int, capacity: int) -> Tensor:
    grown = buffer.new_empty(*buffer.shape[:3], capacity, buffer.shape[4])
    grown[:, :, :, :used] = buffer[:, :, :, :used]
    return grown
