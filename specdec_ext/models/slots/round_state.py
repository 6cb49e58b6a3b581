"""``RoundState``: what a round reads and changes about its rows, on the device.

All tensors stay where they are over the calls of a model, so that recorded rounds can use them. The op
``round_commit`` changes them at the end of a round, so the next round needs no number from the host. The host
reads one entry of results, and may do so after it has started the next round. It writes when rounds begin,
and when rows join or change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.models.base import CommittedRound, RoundTexts, RowRule
from specdec_ext.models.passes.row_numbers import RowNumbers
from specdec_ext.ops import MatchResult, RoundEntry, RoundNumbers
from specdec_ext.tree.draft_tree import ROOT_PARENT, DraftTree

# The most nodes of a tree whose features are gathered, which takes memory for each of them.
FEATURE_NODES = 128
# The state has room for multiples of this number of end-of-sequence ids. An unused place holds NO_TOKEN.
EOS_IDS = 8
NO_TOKEN = -1
# The rows of :attr:`RoundState.noise` and :attr:`RoundState.filters`.
NOISE, FILTERS = ("seed", "stream", "top_k"), ("temperature", "top_p", "min_p")


@dataclass
class RoundState:
    """The state of the rows of a batch. Active rows come first, as in the cache.

    Attributes:
        numbers: ``[10, rows]`` int64, :class:`specdec_ext.ops.RoundNumbers`.
        text: ``[rows, columns]`` int64, the columns of ``sequences``, paddings included.
        eos: ``[ids]`` int64, end-of-sequence ids and places without one.
        new_tokens: ``[rows, MAX_NODES]`` int64, the tokens that each row emitted in the latest round.
        new_features: ``[rows, FEATURE_NODES, width]``, the features of the tokens before ``new_tokens``; None
            until a round has features.
        ring: ``[1, size]`` int64, the result of the latest round. A copy of it is queued before the next
            round, so one entry is enough for a host that is one round behind.
        clock: ``[2]`` int32, the number of rounds, and a counter that is 0 between rounds.
        noise, filters: ``[3, rows]`` int64 and float32, the rules of the rows (:class:`RowRule`).
        stochastic: ``[rows]`` bool, the rest of the rules.
        counters: ``[rows]`` int32, memory of ``ops.verify_match``.
        has_filters: whether the rule of any row has a filter.
        rounds: the number of rounds, on the host.
    """

    numbers: Tensor
    text: Tensor
    eos: Tensor
    new_tokens: Tensor
    ring: Tensor
    clock: Tensor
    noise: Tensor
    filters: Tensor
    stochastic: Tensor
    counters: Tensor
    new_features: Tensor | None = None
    has_filters: bool = False
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
            zeros(EOS_IDS).fill_(NO_TOKEN),
            zeros(rows, ops.MAX_NODES),
            zeros(1, RoundEntry.size(rows, ops.MAX_NODES)),
            zeros(2, dtype=torch.int32),
            zeros(len(NOISE), rows),
            zeros(len(FILTERS), rows, dtype=torch.float32),
            zeros(rows, dtype=torch.bool),
            zeros(rows, dtype=torch.int32),
        )

    @property
    def memory(self) -> tuple[object, ...]:
        """The tensors that a recorded round reads and writes."""
        return tuple(value for value in vars(self).values() if isinstance(value, Tensor))

    def restart(self) -> None:
        """Forget the rounds of the last call, which an error may have ended at any place."""
        self.rounds = 0
        self.clock.zero_()
        self.counters.zero_()

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
            if len(texts.eos) > len(self.eos):
                places = -(-len(texts.eos) // EOS_IDS) * EOS_IDS
                self.eos = self.eos.new_empty(places)
            padded = [*texts.eos, *[NO_TOKEN] * (len(self.eos) - len(texts.eos))]
            self.eos[:] = torch.tensor(padded, dtype=torch.long, device=self.text.device)
        if texts.rules is not None:
            self._set_rules(texts.rules)
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

    def _set_rules(self, rules: Sequence[RowRule]) -> None:
        active, device = len(rules), self.text.device

        def columns(names: Sequence[str]) -> list[list[float]]:
            return [[getattr(rule, name) for rule in rules] for name in names]

        self.noise[:, :active] = torch.tensor(columns(NOISE), device=device)
        self.filters[:, :active] = torch.tensor(
            columns(FILTERS), dtype=torch.float32, device=device
        )
        self.stochastic[:active] = torch.tensor(columns(["stochastic"])[0], device=device)
        self.has_filters = any(rule.is_filtered for rule in rules)

    def verify(self, tree: DraftTree, logits: Tensor) -> MatchResult:
        """Verify the trees of the first rows by the rules of the rows.

        Args:
            tree: ``[rows, nodes]``.
            logits: ``[rows, nodes, vocab]``.
        """
        active, nodes = tree.tokens.shape
        seeds, streams, top_k = self.noise[:, :active]
        if self.has_filters:

            def of_nodes(values: Tensor) -> Tensor:
                return values[..., None].expand(*values.shape, nodes).flatten(-2)

            temperature, top_p, min_p = of_nodes(self.filters[:, :active])
            filters = temperature, of_nodes(top_k), top_p, min_p
            logits = ops.sample_filter(logits.flatten(0, 1), *filters).view(logits.shape)
        positions = self.of_rows(active).root_positions
        noise = seeds, streams, self.stochastic[:active], self.counters[:active]
        return ops.verify_match(logits, tree.tokens, tree.parents, positions, *noise)

    def of_rows(self, active: int) -> RoundNumbers:
        """Views of the numbers of the first ``active`` rows."""
        return RoundNumbers(*self.numbers[:, :active])

    def layout_of_rows(self, active: int) -> Tensor:
        """``[5, active]``, a view of the ``RowNumbers`` of the first rows."""
        return self.numbers[: len(RowNumbers._fields), :active]

    def move_rows(self, to: Tensor, source: Tensor) -> None:
        """Copy row ``source[i]`` to row ``to[i]``, for all i at once."""
        for of_rows in (self.numbers, self.noise, self.filters):
            of_rows[:, to] = of_rows[:, source]
        self.text[to] = self.text[source]
        self.stochastic[to] = self.stochastic[source]

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
        match_lengths: Tensor | None = None,
    ) -> CommittedRound:
        """Commit a round of the first rows.

        Args:
            caches: keys and values of all layers, of these rows.
            tree: ``[rows, nodes]``, the trees.
            verdict: their verification.
            features: ``[rows, nodes, width]`` each.
            match_lengths: see :class:`CommittedRound`.
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
        result = self.ring[0, : RoundEntry.size(active, nodes)]
        if tree.num_nodes > 1 and not tree.is_known:
            parts = [result, tree.tokens.flatten(), tree.parents.flatten()]
            result = torch.cat(parts if match_lengths is None else [*parts, match_lengths])
        return CommittedRound(
            tree,
            verdict,
            self.of_rows(active),
            self.text[:active],
            self.new_tokens[:active],
            new_features,
            result,
            match_lengths,
        )

    def launched(self, committed: CommittedRound) -> CommittedRound:
        """Count a round, and begin to copy what the host reads about it."""
        self.rounds += 1
        return committed.launched(self.rounds)

    def _new_features(self, features: Sequence[Tensor], nodes: int) -> Tensor | None:
        """The buffer for the features of a tree, or None if they can't be gathered."""
        if not 0 < len(features) <= ops.MAX_FEATURE_TENSORS or nodes > FEATURE_NODES:
            return None
        first, width = features[0], sum(each.shape[2] for each in features)
        buffer = self.new_features
        if buffer is None or (buffer.shape[2], buffer.dtype) != (width, first.dtype):
            size = len(self.text), FEATURE_NODES, width
            self.new_features = torch.zeros(size, dtype=first.dtype, device=self.text.device)
        return self.new_features
