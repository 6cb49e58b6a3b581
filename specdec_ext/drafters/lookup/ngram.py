"""N-gram drafter (prompt lookup): copies what followed an earlier occurrence of the last tokens.

Source: Saxena 2023, "Prompt Lookup Decoding". Here the longest match is chosen, and the most recent one among
matches of equal length. A copy that reaches the end of the text continues with the copied tokens. The index
is incremental and implemented in C++ (``csrc/retrieval/ngram_index.h``). The op ``ngram_draft`` drafts the
same from texts that only a device knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext import ops
from specdec_ext._host import NgramIndex
from specdec_ext.context import Context
from specdec_ext.drafters.base import DraftAhead
from specdec_ext.drafters.lookup.retrieval import RetrievalDrafter
from specdec_ext.models import TargetOutput
from specdec_ext.models.base import CommittedRound, FixedDraft
from specdec_ext.tree.draft_tree import DraftTree


class NgramDrafter(RetrievalDrafter):
    """Proposes what followed earlier occurrences of the row's last tokens in its own text.

    Args:
        num_draft_tokens: largest number of proposed tokens.
        min_ngram, max_ngram: smallest and largest number of the last tokens that match.
        num_branches: number of alternatives; 1 proposes a chain, more propose a tree.
    """

    joinable = True

    def __init__(
        self,
        num_draft_tokens: int = 10,
        min_ngram: int = 2,
        max_ngram: int = 6,
        num_branches: int = 1,
    ):
        for name, value in (("num_draft_tokens", num_draft_tokens), ("num_branches", num_branches)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_draft_tokens, self.num_branches = num_draft_tokens, num_branches
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self._indexes: list[NgramIndex] = []

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        self._indexes = [NgramIndex(self.min_ngram, self.max_ngram) for _ in context.generated]
        self._known = [0] * len(self._indexes)
        self.join(context, context.rows, output)

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        for row in rows:
            self._indexes[row] = NgramIndex(self.min_ngram, self.max_ngram)
            text = np.array(context.source(row) + context.prompt(row), dtype=np.int64)
            self._indexes[row].extend(text)
            self._known[row] = 0

    def propose(self, context: Context) -> DraftTree:
        for row in context.rows:
            new = context.generated[row][self._known[row] :]
            self._indexes[row].extend(np.array(new, dtype=np.int64))
            self._known[row] += len(new)
        self._drafted = [self._indexes[row] for row in context.rows]
        tokens, parents = NgramIndex.propose_batch(
            self._drafted, self.num_draft_tokens, self.num_branches
        )
        return DraftTree(torch.from_numpy(tokens), torch.from_numpy(parents))

    def nodes_ahead(self, last: CommittedRound, context: Context) -> int:
        return self.num_draft_tokens + 1

    def prepare_ahead(self, last: CommittedRound, context: Context) -> FixedDraft:
        rule = self.num_draft_tokens, self.min_ngram, self.max_ngram, self.num_branches
        return FixedDraft((NgramDrafter, *rule))

    def draft_ahead(self, last: CommittedRound, context: Context) -> DraftAhead:
        numbers = last.numbers
        num_padded = numbers.text_lengths - numbers.root_positions - 1
        drafted = self.draft(last.text, numbers.text_lengths, num_padded)
        return DraftAhead(DraftTree(drafted.tokens, drafted.parents), drafted.match_lengths)

    def draft(
        self, tokens: Tensor, lengths: Tensor, num_padded: Tensor | None = None
    ) -> ops.NgramDraft:
        """Draft for texts on a device, as :meth:`propose` does for the rows of a call.

        On CUDA this is one launch, and the host neither reads nor waits; so it can follow a round whose
        tokens the host does not know yet.

        Args:
            tokens, lengths, num_padded: the texts, as in :func:`specdec_ext.ops.ngram_draft`.
        """
        nodes = self.num_draft_tokens + 1
        rule = self.min_ngram, self.max_ngram, self.num_branches
        return ops.ngram_draft(tokens, lengths, nodes, *rule, num_padded)

    @property
    def longest_match(self) -> int:
        return self.max_ngram

    @property
    def match_lengths(self) -> list[int]:
        return [index.match_length() for index in self._drafted]
