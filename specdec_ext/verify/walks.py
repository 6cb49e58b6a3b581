"""The walk of a verification over its tree, level by level: which token each row emits at each level.

The walks follow decisions that are made elsewhere: a :class:`FinishedWalk` reads the result of an op
``verify_*``, a :class:`CommittedWalk` that of a round which was committed on the device, and a
:class:`StepwiseWalk` draws each token through the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_ext.context import Context
from specdec_ext.ops import HostMatchResult, MatchResult, RoundEntry
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.processors import Processors

# (processed scores [n, vocab], positions of the preceding tokens, original rows) -> the n drawn tokens
Pick = Callable[[Tensor, Sequence[int], list[int]], list[int]]


class FinishedWalk:
    """A walk that an op has already completed.

    Args:
        tokens: of each node of each row.
        on_host: the result of the op.
        result: the same on the device, if it is needed there.
    """

    def __init__(
        self,
        tokens: list[list[int]],
        on_host: HostMatchResult,
        result: MatchResult | None = None,
    ):
        self.on_host, self._result = on_host, result
        self._nodes, self._lengths, self._next, _ = on_host
        self._tokens = tokens
        self._depth = 0

    def nodes(self, alive: list[int]) -> list[int]:
        """The current node of each of these rows."""
        return [self._nodes[i][self._depth] for i in alive]

    def level(self, alive: list[int]) -> tuple[list[int], list[bool]]:
        """Go down one level: the picked tokens, and whether a drafted child has each of them."""
        self._depth += 1
        descends = [self._depth <= self._lengths[i] for i in alive]
        picks = [
            self._tokens[i][self._nodes[i][self._depth]] if descend else self._next[i]
            for i, descend in zip(alive, descends, strict=True)
        ]
        return picks, descends

    def whole(self, i: int) -> tuple[list[int], int]:
        """All picked tokens of row ``i``, and how many of them come from the draft: all but the last."""
        nodes = self._nodes[i][1 : self._lengths[i] + 1]
        return [*(self._tokens[i][node] for node in nodes), self._next[i]], self._lengths[i]

    def accepted(self, counts: list[int]) -> tuple[Tensor, Tensor, list[list[int]]]:
        """``path``, ``num_accepted`` and ``paths`` of :class:`~specdec_ext.verify.sampler.Accepted`.

        Args:
            counts: number of nodes below the root that each row keeps.
        """
        if self._result is None:
            path = torch.tensor(self._nodes, device="cpu")
            return path, torch.tensor(counts, device="cpu"), self._nodes
        if counts == self._lengths:
            kept = self._result.num_accepted
        else:  # a row ended inside its block
            kept = torch.tensor(counts, device=self._result.path.device)
        return self._result.path, kept, self._nodes


class StepwiseWalk:
    """A walk node by node, for processors that read the text. It makes the same calls as plain decoding."""

    def __init__(
        self, processors: Processors, pick: Pick, tree: DraftTree, scores: Tensor, context: Context
    ):
        self._processors, self._pick = processors, pick
        self._scores, self._context = scores, context
        self._tokens, self._parents = tree.token_lists, tree.parent_lists
        self._paths = [[0] for _ in context.rows]
        self._positions = context.root_positions
        self._depth = 0

    def nodes(self, alive: list[int]) -> list[int]:
        return [self._paths[i][-1] for i in alive]

    def level(self, alive: list[int]) -> tuple[list[int], list[bool]]:
        rows = [self._context.rows[i] for i in alive]
        index = torch.tensor([alive, self.nodes(alive)], device=self._scores.device).unbind()
        columns = [self._context.columns(row) for row in rows]
        processed = self._processors.with_text(
            self._scores[index], self._context.sequences(), rows, columns
        )
        self._scores[index] = processed
        picks = self._pick(processed, [self._positions[i] + self._depth for i in alive], rows)
        self._depth += 1
        descends = []
        for i, token in zip(alive, picks, strict=True):
            child = self._child(i, token)
            descends.append(child is not None)
            if child is not None:
                self._paths[i].append(child)
        return picks, descends

    def _child(self, i: int, token: int) -> int | None:
        parent = self._paths[i][-1]
        return next(
            (
                node
                for node in range(parent + 1, len(self._parents[i]))
                if self._parents[i][node] == parent and self._tokens[i][node] == token
            ),
            None,
        )

    def accepted(self, counts: list[int]) -> tuple[Tensor, Tensor, list[list[int]]]:
        width, device = len(self._tokens[0]), self._scores.device
        paths = [path + [-1] * (width - len(path)) for path in self._paths]
        return torch.tensor(paths, device=device), torch.tensor(counts, device=device), paths


class CommittedWalk:
    """A walk whose tokens were emitted on the device, up to the ends that the device knows."""

    def __init__(self, entry: RoundEntry):
        self.on_host = entry
        self._depth = 0

    def nodes(self, alive: list[int]) -> list[int]:
        return [self.on_host.paths[i][self._depth] for i in alive]

    def level(self, alive: list[int]) -> tuple[list[int], list[bool]]:
        picks = [self.on_host.tokens[i][self._depth] for i in alive]
        self._depth += 1
        counts = self.on_host.num_accepted
        return picks, [self._depth <= counts[i] for i in alive]

    def whole(self, i: int) -> tuple[list[int], int]:
        """The tokens of row ``i``, none if it had ended, and how many nodes of the draft were accepted."""
        entry = self.on_host
        return entry.tokens[i][: entry.counts[i]], max(0, entry.num_accepted[i])

    def accepted(self, counts: list[int]) -> tuple[Tensor, Tensor, list[list[int]]]:
        paths = self.on_host.paths
        return torch.tensor(paths, device="cpu"), torch.tensor(counts, device="cpu"), paths


Walk = FinishedWalk | StepwiseWalk | CommittedWalk
