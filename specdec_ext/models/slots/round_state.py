"""``RoundState``: what a round reads and changes about its rows, on the device.

All tensors stay where they are during a call. The op ``round_commit`` changes them at the end of a round, so
the next round needs no number from the host. The host reads one entry of results, and may do so after it has
started the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.models.base import CommittedRound
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

    @classmethod
    def begin(
        cls, rows: Tensor, text: Tensor, lengths: Sequence[int], limit: int, eos: Sequence[int]
    ) -> RoundState:
        """The state after the prompt.

        Args:
            rows: ``[5, rows]`` int64, the ``RowNumbers`` of the rows.
            text: ``[rows, at least max(lengths)]`` int64.
            lengths: the length of each row's text, its first emitted token included.
            limit: the length of the text at which every row ends.
            eos: end-of-sequence ids.
        """
        device, batch = text.device, len(text)
        columns = torch.tensor(lengths, device=device)
        room = text.new_zeros(batch, max(limit, text.shape[1]))
        room[:, : text.shape[1]] = text
        layout = RowNumbers(*rows)
        numbers = RoundNumbers(
            **layout._asdict(),
            roots=room.gather(1, columns[:, None] - 1)[:, 0],
            root_parents=torch.full_like(columns, ROOT_PARENT),
            text_lengths=columns,
            limits=torch.full_like(columns, limit),
            counts=torch.ones_like(columns),
        )
        return cls(
            torch.stack(numbers),
            room,
            torch.tensor(eos, dtype=torch.long, device=device),
            text.new_zeros(batch, ops.MAX_NODES),
            text.new_zeros(ENTRIES, RoundEntry.size(batch, ops.MAX_NODES)),
            torch.zeros(2, dtype=torch.int32, device=device),
        )

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
