"""``round_commit``: everything that a round of decoding changes, written at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library

# The most tensors of features.
MAX_FEATURE_TENSORS = 8
# A row of an entry with this status had numbers out of range and was left as it was; on the CPU this is an
# error. The other values are those of the verification.
STATUS_ILLEGAL_NUMBERS = 3


class RoundNumbers(NamedTuple):
    """The numbers of the rows, ``[batch]`` int64 each: the rows of the argument ``numbers``.

    The first five are :class:`specdec_ext.models.passes.row_numbers.RowNumbers`.

    Attributes:
        root_positions: number of tokens before the root, without paddings.
        ends: the slot of the cache to which the root moves.
        first_slots: the slot of the first token.
        lengths: number of slots from the first token to the last.
        block_starts: the slot of node 0 of the next block, the same for all rows: the largest end. Rows that
            have ended count, because a pass over the next block writes to them, too.
        roots: the last token.
        root_parents: the parent of node 0 of the next tree: -1, or -2 for a row that has ended.
        text_lengths: number of tokens in ``text``.
        limits: the length of the text at which the row ends, at most the columns of ``text``.
        counts: number of tokens that the latest round emitted.
    """

    root_positions: Tensor
    ends: Tensor
    first_slots: Tensor
    lengths: Tensor
    block_starts: Tensor
    roots: Tensor
    root_parents: Tensor
    text_lengths: Tensor
    limits: Tensor
    counts: Tensor


class RoundEntry(NamedTuple):
    """What the host reads about a round, per row.

    Attributes:
        round: number of the round, from 1 on.
        counts: number of emitted tokens; 0 for an inactive row, and for all rows if any status is not 0.
        num_accepted: as in :class:`specdec_ext.ops.MatchResult`: nodes after the end of a row count, too.
        ended: whether the row ended with its last token.
        status: as in :class:`specdec_ext.ops.MatchResult`, or ``STATUS_ILLEGAL_NUMBERS``.
        tokens: the emitted tokens, then -1; as many as there are nodes.
        paths: as in :class:`specdec_ext.ops.MatchResult`.
    """

    round: int
    counts: list[int]
    num_accepted: list[int]
    ended: list[bool]
    status: list[int]
    tokens: list[list[int]]
    paths: list[list[int]]

    @staticmethod
    def size(batch: int, nodes: int) -> int:
        """Number of integers in an entry."""
        return 1 + batch * (4 + 2 * nodes)

    @classmethod
    def of(cls, entry: Tensor, batch: int, nodes: int) -> RoundEntry:
        """Copy the first :meth:`size` numbers of ``entry``, a row of the ring, to the host and name them."""
        number, *values = entry[: cls.size(batch, nodes)].tolist()
        counts, accepted, ended, status = (values[i * batch :][:batch] for i in range(4))
        lists = [values[4 * batch + i * nodes :][:nodes] for i in range(2 * batch)]
        return cls(
            number, counts, accepted, [*map(bool, ended)], status, lists[:batch], lists[batch:]
        )

    def of_row(self, row: int) -> RoundEntry:
        """The entry of a round with this row alone."""
        return RoundEntry(
            self.round,
            [self.counts[row]],
            [self.num_accepted[row]],
            [self.ended[row]],
            [self.status[row]],
            [self.tokens[row]],
            [self.paths[row]],
        )


def round_commit(
    caches: Sequence[Tensor],
    tokens: Tensor,
    verdict: Tensor,
    eos: Tensor,
    numbers: Tensor,
    text: Tensor,
    new_tokens: Tensor,
    ring: Tensor,
    clock: Tensor,
    features: Sequence[Tensor] = (),
    new_features: Tensor | None = None,
) -> None:
    """Commit a round: keep what a verification has accepted, and write it down for the next round.

    A row emits the tokens of its walk through the tree up to the first one that is an end-of-sequence id or
    fills its text up to the limit; then it has ended. With n emitted tokens it keeps the first n nodes of its
    path, the root included. Their keys and values move from ``block_starts`` to ``ends`` as in
    :func:`kv_compact`.

    If any status of the verdict is not 0, the round is void: nothing changes but the counts, which become 0,
    and the entry says why. On CUDA this is one launch for up to 128 layers, and the host reads nothing.

    Args:
        caches: keys and values of all layers, each ``[batch, heads, slots, head_dim]`` as in
            :func:`kv_compact`, written in place.
        tokens: ``[batch, nodes]`` int64, the tokens of the trees.
        verdict: ``[batch * (nodes + 3)]`` int64, contiguous: ``packed`` of a :class:`MatchResult`.
        eos: ``[ids]`` int64, the end-of-sequence ids; may be empty.
        numbers: ``[10, batch]`` int64, :class:`RoundNumbers`, written in place.
        text: ``[batch, columns]`` int64; emitted tokens are appended to the rows.
        new_tokens: ``[batch, at least nodes]`` int64; the first columns get the emitted tokens. With
            ``new_features`` and the counts they are what a draft head reads next.
        ring: ``[entries, at least RoundEntry.size(batch, nodes)]`` int64, contiguous rows. Round n, from 1
            on, writes row ``(n - 1) % entries``, which :meth:`RoundEntry.of` reads.
        clock: ``[2]`` int32: the number of rounds so far, and 0.
        features: hidden states of the nodes, ``[batch, nodes, width]`` each; at most ``MAX_FEATURE_TENSORS``.
        new_features: ``[batch, at least nodes, width of all features]`` of the dtype of ``features``. Column
            i of a row gets the features of the node before emitted token i, concatenated; later columns are
            left as they are. May be None if there are no features.

    Raises:
        ValueError: for an invalid argument. A node, slot or length out of range is an error on the CPU,
            before anything is written. On CUDA the numbers stay on the device: the row emits nothing and has
            ``STATUS_ILLEGAL_NUMBERS``; a move to or from a slot outside a cache is skipped.
    """
    _library.native.round_commit(
        caches,
        tokens,
        verdict,
        eos,
        numbers,
        text,
        new_tokens,
        ring,
        clock,
        features,
        new_features,
    )


@torch.library.register_fake("specdec::round_commit")
def _round_commit_fake(*_: Any) -> None:
    return None
