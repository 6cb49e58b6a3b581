"""``RoundState``: what a round reads and changes about its rows, on the device.

All tensors stay where they are during a call, and while an engine runs. The op ``round_commit`` changes them
at the end of a round, so the next round needs no number from the host. The host reads one entry of results,
and may do so after it has started the next round. It writes when rounds begin, and when rows join or change
places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.models.base import CommittedRound, RoundTexts
from specdec_ext.models.passes.row_numbers import RowNumbers
from specdec_ext.ops import MatchResult, RoundEntry, RoundNumbers
from specdec_ext.transfer import Arriving
from specdec_ext.tree.draft_tree import ROOT_PARENT, DraftTree

# The most nodes of a tree whose features are gathered, which takes memory for each of them.
FEATURE_NODES = 128
# A host that is one round behind reads an entry while the next one is written.
ENTRIES = 2


@dataclass
class RoundState:
    """The state of the rows of a batch. Active rows come first, as in the cache.

    Attributes:
        numbers: ``[10, rows]`` int64, :class:`specdec_ext.ops.RoundNumbers`.
        text: ``[rows, columns]`` int64, the columns of ``sequences``, paddings included.
        eos: ``[ids]`` int64, end-of-sequence ids.
        new_tokens: ``[rows, MAX_NODES]`` int64, the tokens that each row emitted in the latest round.
        new_features: ``[rows, FEATURE_NODES, width]``, the features of the tokens before ``new_tokens``; None
            until a round has features.
        ring: ``[ENTRIES, size]`` int64, the results of the latest rounds.
        clock: ``[2]`` int32, the number of rounds, and a counter that is 0 between rounds.
        rounds: the number of rounds, on the host.
    """

    numbers: Tensor
    text: Tensor
    eos: Tensor
    new_tokens: Tensor
    ring: Tensor
    clock: Tensor
    new_features: Tensor | None = None
    rounds: int = 0
    _eos: list[int] = field(default_factory=list)  # on the host

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> RoundState:
        """A state with room for so many rows and columns of text, in which no round has begun."""

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(len(RoundNumbers._fields), rows),
            zeros(rows, columns),
            zeros(0),
            zeros(rows, ops.MAX_NODES),
            zeros(ENTRIES, RoundEntry.size(rows, ops.MAX_NODES)),
            zeros(2, dtype=torch.int32),
        )

    def has_room(self, rows: int, columns: int) -> bool:
        return rows <= len(self.text) and columns <= self.text.shape[1]

    def begin(self, layout: Tensor, ends: Tensor, texts: RoundTexts) -> None:
        """Go on from what the host knows, after the prompt or after rows have joined.

        Args:
            layout: ``[5, rows]`` int64, the ``RowNumbers`` of the active rows.
            ends: ``[2, rows]`` int64, the lengths and limits of ``texts``.
            texts: the text of these rows.
        """
        active, (lengths, limits) = len(texts.lengths), ends
        if texts.eos != self._eos:
            self._eos = texts.eos
            self.eos = torch.tensor(texts.eos, dtype=torch.long, device=self.text.device)
        self.text[active - len(texts.new) : active, : texts.new.shape[1]] = texts.new
        numbers = RoundNumbers(
            **RowNumbers(*layout)._asdict(),
            roots=self.text[:active].gather(1, lengths[:, None] - 1)[:, 0],
            root_parents=torch.full_like(lengths, ROOT_PARENT),
            text_lengths=lengths,
            limits=limits,
            counts=torch.ones_like(lengths),
        )
        self.numbers[:, :active] = torch.stack(numbers)

    def of_rows(self, active: int) -> RoundNumbers:
        """Views of the numbers of the first ``active`` rows."""
        return RoundNumbers(*self.numbers[:, :active])

    def layout_of_rows(self, active: int) -> Tensor:
        """``[5, active]``, a view of the ``RowNumbers`` of the first rows."""
        return self.numbers[: len(RowNumbers._fields), :active]

    def move_rows(self, to: Tensor, source: Tensor) -> None:
        """Copy row ``source[i]`` to row ``to[i]``, for all i at once."""
        self.numbers[:, to] = self.numbers[:, source]
        self.text[to] = self.text[source]

    def keep_rows(self, active: int) -> Tensor:
        """Go on with the first ``active`` rows; returns their layout, as :meth:`layout_of_rows`."""
        numbers = self.of_rows(active)
        numbers.block_starts[:] = numbers.ends.max()
        return self.layout_of_rows(active)

    def commit(
        self,
        caches: Sequence[Tensor],
        tree: DraftTree,
        verdict: MatchResult,
        features: Sequence[Tensor],
    ) -> CommittedRound:
        """Commit a round of the first rows, and begin to copy what the host reads about it.

        Args:
            caches: keys and values of all layers, of these rows.
            tree: ``[rows, nodes]``, the trees.
            verdict: their verification.
            features: ``[rows, nodes, width]`` each.
        """
        active, nodes = tree.tokens.shape
        gathered = self._new_features(features, nodes)
        new_features = None if gathered is None else gathered[:active]
        ops.round_commit(
            caches,
            tree.tokens,
            verdict.packed,
            self.eos,
            self.numbers[:, :active],
            self.text[:active],
            self.new_tokens[:active],
            self.ring,
            self.clock,
            [*features] if gathered is not None else [],
            new_features,
        )
        read = self.ring[self.rounds % ENTRIES, : RoundEntry.size(active, nodes)]
        if tree.num_nodes > 1 and not tree.is_on_host:
            read = torch.cat([read, tree.tokens.flatten(), tree.parents.flatten()])
        self.rounds += 1
        return CommittedRound(
            tree,
            verdict,
            self.rounds,
            self.of_rows(active),
            self.text[:active],
            self.new_tokens[:active],
            new_features,
            Arriving(read),
        )

    def _new_features(self, features: Sequence[Tensor], nodes: int) -> Tensor | None:
        """The buffer for the features of a tree, or None if they can't be gathered."""
        if not 0 < len(features) <= ops.MAX_FEATURE_TENSORS or nodes > FEATURE_NODES:
            return None
        first, width = features[0], sum(each.shape[2] for each in features)
        if self.new_features is None:
            size = len(self.text), FEATURE_NODES, width
            self.new_features = torch.zeros(size, dtype=first.dtype, device=self.text.device)
        return self.new_features
