"""The branches of draft trees, for targets that can't keep siblings apart in one row.

Every path from a root to a leaf becomes a row of its own in the pass, and what several branches share is read
in each of them: a tree costs its branches times its depth, where a mask would let it cost its nodes. A pass
that is bound by reading the weights hardly notices.
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
    """Where the nodes of a batch of trees are read.

    Attributes:
        tokens: of each branch, known ones in front included.
        origins: the row that each branch belongs to.
        rows, columns: of each node of each row, a branch that it lies in and where; 0 for inactive nodes.
    """

    tokens: list[list[int]]
    origins: list[int]
    rows: list[list[int]]
    columns: list[list[int]]

    @classmethod
    def of(cls, tree: DraftTree, before: Sequence[list[int]]) -> Branches:
        """Those of ``tree``, with the tokens ``before[r]`` in front of every branch of row r."""
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
        """One of each row, of known tokens alone."""
        nothing: list[list[int]] = [[] for _ in tokens]
        return cls(tokens, [*range(len(tokens))], nothing, nothing)

    @property
    def split(self) -> bool:
        """Whether any row has several."""
        return len(self.origins) > len(self.rows)

    def nodes(self, output: TargetOutput) -> TargetOutput:
        """What a pass over the branches computed at each node of the trees."""
        device = output.logits.device
        rows, columns = (torch.tensor(index, device=device) for index in (self.rows, self.columns))
        return output.at(rows, columns)


def padded(tokens: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """``[rows, width]``; behind the end of a shorter row its first token again, of an empty one 0.

    What is computed there is of no use, but a model that computes NaN from some token had better read one of
    the text: masked or not, NaN may reach the other tokens of its row.
    """
    width = max(map(len, tokens))
    rows = [[*row, *[row[0] if row else 0] * (width - len(row))] for row in tokens]
    return torch.tensor(rows, device=device)
