"""The branches of draft trees, for targets that can't keep siblings apart in one row.

Every path from the root to a leaf becomes a separate row of the pass, and tokens that several branches share
are read in each of them. A tree therefore costs its branches times its depth, while a tree mask would cost
its nodes. The difference is small in a pass that is bound by reading the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_ext.models.base import TargetOutput
from specdec_ext.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class Branches:
    """The branches of a batch of trees, and the place of every node in them.

    Attributes:
        tokens: tokens of each branch, including the known tokens in front.
        origins: the row that each branch belongs to.
        rows, columns: for each node of each row, the index of one branch that contains it and its column in
            that branch; 0 for inactive nodes.
    """

    tokens: list[list[int]]
    origins: list[int]
    rows: list[list[int]]
    columns: list[list[int]]

    @classmethod
    def of(cls, tree: DraftTree, before: Sequence[list[int]]) -> Branches:
        """Split ``tree`` into branches, with the tokens ``before[r]`` in front of every branch of row r."""
        found = cls([], [], [], [])
        for row, (known, drafted) in enumerate(zip(before, tree.token_lists, strict=True)):
            rows, columns = [0] * len(drafted), [0] * len(drafted)
            for branch in tree.branches[row]:
                for depth, node in enumerate(branch):
                    rows[node], columns[node] = len(found.tokens), len(known) + depth
                found.tokens.append([*known, *(drafted[node] for node in branch)])
                found.origins.append(row)
            found.rows.append(rows)
            found.columns.append(columns)
        return found

    @classmethod
    def known(cls, tokens: list[list[int]]) -> Branches:
        """Make one branch per row, of known tokens without a tree."""
        nothing: list[list[int]] = [[] for _ in tokens]
        return cls(tokens, [*range(len(tokens))], nothing, nothing)

    @property
    def split(self) -> bool:
        """Whether any row has several branches."""
        return len(self.origins) > len(self.rows)

    def nodes(self, output: TargetOutput) -> TargetOutput:
        """Gather the output of a pass over the branches at each node of the trees."""
        device = output.logits.device
        rows, columns = (torch.tensor(index, device=device) for index in (self.rows, self.columns))
        return output.at(rows, columns)


def padded(tokens: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Pad token lists to ``[rows, width]`` with the first token of their row (0 for an empty row).

    The outputs at padding are not used. The padding is a token of the text because a model may compute NaN
    from some other token, and NaN may reach the other tokens of its row even if it is masked.
    """
    width = max(map(len, tokens))
    rows = [[*row, *[row[0] if row else 0] * (width - len(row))] for row in tokens]
    return torch.tensor(rows, device=device)
