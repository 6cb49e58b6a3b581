"""``Processors``: transformers' prepared logits processors, applied to nodes as plain decoding applies them.

A node's scores depend on its own prefix, the row's text and the path to the node. What a processor needs of
that decides how many nodes may go through it at once, and which verification rules can be served at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specdec_ext.context import Context
from specdec_ext.keyword_table import Reads
from specdec_ext.keywords import reads_of
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.filters import SampleFilter, fuse_filters


class Processors:
    """One call's processors.

    Args:
        processors: transformers' prepared list, warpers included.
        device: of the logits.

    Raises:
        ValueError: for a processor that can't be served.

    Attributes:
        pure: whether all are functions of the scores alone, so that all nodes go through them at once.
        keep_nan: whether scores of NaN are sure to stay NaN.
        with_memory: names of those that may keep state or look at other rows: they must be called as plain
            decoding calls them, once per emitted position.
    """

    def __init__(self, processors: LogitsProcessorList, device: torch.device):
        self._all: Any = fuse_filters(processors, device)
        called = [
            (each, Reads.SCORES if type(each) is SampleFilter else reads_of(each))
            for each in self._all
        ]
        self._shared = [each for each, reads in called if reads is Reads.SCORES]
        self.keep_nan = all(type(each) is SampleFilter for each in self._all)
        self.pure = len(self._shared) == len(self._all)
        self.with_memory = sorted(
            {type(each).__name__ for each, reads in called if reads is Reads.ORDER}
        )

    def shared(self, logits: Tensor) -> Tensor:
        """``[n, vocab]`` scores after the processors that do not look at the text."""
        if not self._shared:
            return logits
        scores = logits if isinstance(self._shared[0], SampleFilter) else logits.float()
        no_text = logits.new_empty(len(logits), 0).long()
        for processor in self._shared:
            scores = processor(no_text, scores)
        return scores

    def with_text(
        self, scores: Tensor, ids: Tensor, rows: Sequence[int], columns: Sequence[int]
    ) -> Tensor:
        """``[n, vocab]`` scores after all processors.

        Args:
            scores: ``[n, vocab]`` float32.
            ids: ``[batch, at least max(columns)]``, the text.
            rows: original row of each of the n, no row twice.
            columns: how many columns of its row come before each.
        """
        processed = torch.empty_like(scores)
        for width in sorted(set(columns)):
            # Row b of the batch at index b, as processors that know their rows expect.
            members = [j for j, length in enumerate(columns) if length == width]
            batch = scores.new_zeros(len(ids), scores.shape[-1])
            numbers = torch.tensor([rows[j] for j in members], device=scores.device)
            batch[numbers] = scores[members]
            processed[members] = self._all(ids[:, :width], batch)[numbers].to(scores.dtype)
        return processed

    def on_tree(self, logits: Tensor, tree: DraftTree, context: Context) -> Tensor:
        """``[rows, nodes, vocab]`` scores of all nodes after all processors, each with its own prefix.

        For processors without memory: they are called at nodes that no walk may visit.
        """
        if not self._all:
            return logits
        if self.pure:
            return self.shared(logits.flatten(0, 1)).view(logits.shape)
        scores = logits.to(torch.float32, copy=True)
        tokens, parents, depths = tree.token_lists, tree.parent_lists, tree.depths
        ids = torch.nn.functional.pad(context.sequences(), (0, max(map(max, depths))))
        paths: list[list[list[int]]] = [[[]] for _ in tokens]
        for node in range(tree.num_nodes):
            members = [i for i, row in enumerate(depths) if row[node] >= 0]
            text = ids.clone()
            for i, row in enumerate(paths):
                if node:
                    above = row[parents[i][node]] if depths[i][node] > 0 else []
                    row.append([*above, tokens[i][node]])
                start = context.columns(context.rows[i])
                path = row[node] if depths[i][node] >= 0 else []
                text[context.rows[i], start : start + len(path)] = ids.new_tensor(path)
            numbers = [context.rows[i] for i in members]
            columns = [context.columns(context.rows[i]) + depths[i][node] for i in members]
            scores[members, node] = self.with_text(scores[members, node], text, numbers, columns)
        return scores
