"""``Processors``: transformers' logits processors, applied to tree nodes exactly as plain decoding does.

The scores of a node may depend on the node's prefix: the row's text and the path to the node. How much of the
prefix a processor reads decides how many nodes it can process at once, and which verification rules are
possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from specdec_ext.context import Context
from specdec_ext.keyword_table import Reads
from specdec_ext.keywords import reads_of
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.adjustments import AdjustLogits, fuse_adjustments
from specdec_ext.verify.filters import STAGES, SampleFilter, fuse_filters


class Processors:
    """The logits processors of one call.

    Args:
        processors: the list that transformers prepared, warpers included.
        device: the device of the logits.

    Raises:
        ValueError: for a processor that is not supported.

    Attributes:
        on_host: names of the processors that are called node by node, with the text on the host. Without
            them, all nodes are processed at once, by ops on the device of the logits.
        reads_text: whether a processor reads the text, on the device or on the host.
        keep_nan: whether logits that are all NaN are certain to leave NaN in the scores.
        temperature: by which the logits are divided, 1 without a temperature.
        filters: the arguments of ``ops.sample_filter`` for every row, if the op computes all processors; else
            None.
        narrows: whether a processor may make the distribution narrower than its temperature does, as top-k,
            top-p and min-p do.
        with_memory: names of the processors that may keep state or read other rows. They must be called as
            plain decoding calls them, once per emitted position.
    """

    def __init__(self, processors: LogitsProcessorList, device: torch.device):
        self.temperature = math.prod(
            float(each.temperature)
            for each in processors
            if isinstance(each, TemperatureLogitsWarper)
        )
        self.narrows = any(not isinstance(each, TemperatureLogitsWarper) for each in processors)
        self._all: Any = fuse_filters(processors, device)
        called = [
            (each, Reads.SCORES if type(each) is SampleFilter else reads_of(each))
            for each in self._all
        ]
        self.filters: dict[str, Any] | None = dict(STAGES.values()) if not self._all else None
        if len(self._all) == 1 and type(self._all[0]) is SampleFilter:
            self.filters = self._all[0].values
        self._shared = [each for each, reads in called if reads is Reads.SCORES]
        self.reads_text = len(self._shared) < len(self._all)
        self._at_once = fuse_adjustments(self._all)
        self.on_host = [
            type(each).__name__
            for each in self._at_once
            if not isinstance(each, AdjustLogits) and each not in self._shared
        ]
        self.keep_nan = all(
            each.keeps_nan if isinstance(each, AdjustLogits) else type(each) is SampleFilter
            for each in self._at_once
        )
        self.with_memory = sorted(
            {type(each).__name__ for each, reads in called if reads is Reads.ORDER}
        )

    def stage(self, context: Context) -> None:
        """Begin a round: stage what the processors read on the device."""
        for each in self._at_once:
            if isinstance(each, AdjustLogits):
                each.stage(context)

    def shared(self, logits: Tensor) -> Tensor:
        """``[n, vocab]`` scores after the processors that do not read the text."""
        scores = logits
        for processor in self._shared:
            scores = _without_text(processor, scores)
        return scores

    def with_text(
        self, scores: Tensor, ids: Tensor, rows: Sequence[int], columns: Sequence[int]
    ) -> Tensor:
        """``[n, vocab]`` scores after all processors.

        Args:
            scores: ``[n, vocab]`` float32.
            ids: ``[batch, at least max(columns)]``, the text.
            rows: original row of each entry of ``scores``, each row at most once.
            columns: number of columns of the row before each entry.
        """
        processed = torch.empty_like(scores)
        for width in sorted(set(columns)):
            # Row b of the batch is at index b, because some processors depend on the row number.
            members = [j for j, length in enumerate(columns) if length == width]
            batch = scores.new_zeros(len(ids), scores.shape[-1])
            numbers = torch.tensor([rows[j] for j in members], device=scores.device)
            batch[numbers] = scores[members]
            processed[members] = self._all(ids[:, :width], batch)[numbers].to(scores.dtype)
        return processed

    def _on_device(self, logits: Tensor, tree: DraftTree, context: Context) -> Tensor:
        scores = logits
        for each in self._at_once:
            if isinstance(each, AdjustLogits):
                scores = each.on_tree(scores, tree, context)
            else:
                scores = _without_text(each, scores.flatten(0, 1)).view(logits.shape)
        return scores

    def on_tree(self, logits: Tensor, tree: DraftTree, context: Context) -> Tensor:
        """``[rows, nodes, vocab]`` scores of all nodes after all processors, each with the node's prefix.

        This also calls processors at nodes that the walk does not visit, so they must not keep state.
        """
        if not self.on_host:
            return self._on_device(logits, tree, context)
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


def _without_text(processor: Any, scores: Tensor) -> Tensor:
    """``[n, vocab]`` scores after a processor that does not read the text."""
    no_text = scores.new_empty(len(scores), 0).long()
    takes_half = isinstance(processor, SampleFilter)
    processed: Tensor = processor(no_text, scores if takes_half else scores.float())
    return processed
