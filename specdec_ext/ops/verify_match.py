"""``verify_match``: which draft tokens the target would have emitted itself, and its next token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library

STATUS_OK = 0
STATUS_NAN = 1
STATUS_NO_FINITE_LOGIT = 2


class MatchResult:
    """The result of a verification. Unpacking gives the first four attributes in this order.

    Attributes:
        path: ``[batch, nodes]``; the visited node at depth d for d <= num_accepted (node 0 first),
            -1 beyond.
        num_accepted: ``[batch]``, number of accepted draft tokens; -1 for an inactive row.
        next_token: ``[batch]``; the bonus token at a leaf, the correction elsewhere; -1 for an inactive
            row or if ``status`` is not 0.
        status: ``[batch]``; 0: ok; 1: the logits of the visited node contain NaN; 2: all of them are -inf. If
            it is not 0, ``path`` and ``num_accepted`` describe the walk before that node.
        packed: ``[batch * (nodes + 3)]``, the output of the op: the other attributes one after another. They
            are views, created on access, because most steps only call :meth:`on_host`.
    """

    def __init__(self, packed: Tensor, batch: int, nodes: int):
        self.packed, self._batch, self._nodes = packed, batch, nodes

    @property
    def path(self) -> Tensor:
        return self.packed[: self._batch * self._nodes].view(self._batch, self._nodes)

    @property
    def num_accepted(self) -> Tensor:
        return self._behind_path(0)

    @property
    def next_token(self) -> Tensor:
        return self._behind_path(1)

    @property
    def status(self) -> Tensor:
        return self._behind_path(2)

    def _behind_path(self, part: int) -> Tensor:
        begin = self._batch * (self._nodes + part)
        return self.packed[begin : begin + self._batch]

    def copied(self) -> MatchResult:
        """A copy of the result."""
        return MatchResult(self.packed.clone(), self._batch, self._nodes)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.path, self.num_accepted, self.next_token, self.status))

    def on_host(self) -> HostMatchResult:
        """Copy the result to the host, in one copy."""
        batch, nodes = self._batch, self._nodes
        numbers = self.packed.tolist()
        paths = [numbers[row * nodes : (row + 1) * nodes] for row in range(batch)]
        begins = [batch * (nodes + part) for part in range(3)]
        return HostMatchResult(paths, *[numbers[begin : begin + batch] for begin in begins])


class HostMatchResult(NamedTuple):
    """:class:`MatchResult` in lists."""

    path: list[list[int]]
    num_accepted: list[int]
    next_token: list[int]
    status: list[int]

    def of_row(self, i: int) -> HostMatchResult:
        """The result of row ``i`` alone, as row 0."""
        return HostMatchResult(
            [self.path[i]], [self.num_accepted[i]], [self.next_token[i]], [self.status[i]]
        )


def verify_match(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
    stochastic: Tensor,
    counters: Tensor | None = None,
) -> MatchResult:
    """Verify trees by rule 1, "match": walk each tree along tokens drawn from the target.

    At each visited node, starting at the root, one token is picked: the arg-max of the processed logits plus
    Gumbel noise (greedy: without noise); ties go to the lowest token id. If a child has this token, the walk
    continues at the first such child; otherwise the token is ``next_token`` and the walk ends. The noise is a
    function of (seed, row id, absolute position, token), so it does not depend on the tree.

    Args:
        logits: ``[batch, nodes, vocab]`` float32, bfloat16 or float16: the target's logits after all
            processors. The last dimension is contiguous. Logits of nodes that are not visited have no effect;
            the CPU does not read them.
        tokens: ``[batch, nodes]`` int64.
        parents: ``[batch, nodes]`` int64.
        root_positions: ``[batch]`` int64; number of unpadded tokens before the root. The token drawn at
            depth d has position ``root_positions + d + 1``.
        seeds: ``[batch]`` int64.
        row_ids: ``[batch]`` int64; the stream of its seed that a row uses.
        stochastic: ``[batch]`` bool; False is greedy.
        counters: ``[batch]`` or longer, int32, contiguous, zero before and after the call. On CUDA, the
            blocks of a row count in it how many of them are done, so that the op is one kernel launch.
            Without it, each call allocates and clears a tensor. Calls that may run at the same time need
            different ones.
    """
    packed = _library.native.verify_match(
        logits, tokens, parents, root_positions, seeds, row_ids, stochastic, counters
    )
    return MatchResult(packed, *parents.shape)


@torch.library.register_fake("specdec::verify_match")
def _verify_match_fake(
    logits: Tensor, tokens: Tensor, parents: Tensor, *_: Tensor | None
) -> Tensor:
    batch, nodes = parents.shape
    return parents.new_empty(batch * (nodes + 3))
