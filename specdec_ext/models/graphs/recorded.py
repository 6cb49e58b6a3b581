"""``RecordedPass``: a forward pass over a fixed number of rows and nodes, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.models.base import TargetOutput
from specdec_ext.models.cache.layers import RollbackLayer
from specdec_ext.models.graphs.graph import Graph, NotRecordableError
from specdec_ext.models.passes.attention import TreeBlock
from specdec_ext.models.passes.row_numbers import RowNumbers
from specdec_ext.models.passes.visibility import BlockVisibility
from specdec_ext.tree.draft_tree import INACTIVE, DraftTree

# (tokens [rows, nodes], positions [rows, nodes], block) -> the output of the model's modules
Forward = Callable[[Tensor, Tensor, BlockVisibility], TargetOutput]


class RecordedPass:
    """One forward pass of fixed shape.

    Only the contents of its inputs change from pass to pass: tokens and parents of the trees, and the numbers
    of the rows. Everything else (positions, ancestors, slots) is computed from them on the device.

    Args:
        graph: what records the pass.
        rows, nodes: the shape of the trees.
        slots: number of slots of the buffers of the layers.
        device: of the buffers.
    """

    def __init__(self, graph: Graph, rows: int, nodes: int, slots: int, device: torch.device):
        self._graph, self._slots = graph, slots
        numbers = len(RowNumbers._fields)
        self._tokens = torch.zeros(rows, nodes, dtype=torch.long, device=device)
        self._parents = torch.full((rows, nodes), INACTIVE, device=device)
        self._numbers = torch.zeros(numbers, rows, dtype=torch.long, device=device)
        self._nodes = torch.arange(nodes, device=device)

    def __call__(
        self, tree: DraftTree, numbers: Tensor, layers: Sequence[RollbackLayer], forward: Forward
    ) -> TargetOutput:
        """Score the trees.

        Args:
            tree: ``[rows, nodes]``, or fewer nodes.
            numbers: ``[5, rows]``, the ``RowNumbers`` of this step.
            layers: the cache layers, which use these buffers.
            forward: runs the model. A CUDA graph calls it only to record it.

        Returns:
            The output, copied, because the next replay overwrites the recorded tensors.
        """
        nodes = tree.num_nodes
        self._tokens[:, :nodes] = tree.tokens
        self._parents[:, :nodes] = tree.parents
        self._parents[:, nodes:] = INACTIVE
        self._numbers[:] = numbers
        self._graph.run(lambda: self._compute(layers, forward))
        output = self._output
        return TargetOutput(
            output.logits[:, :nodes].clone(),
            tuple(state[:, :nodes].clone() for state in output.aux_hidden_states),
        )

    def _compute(self, layers: Sequence[RollbackLayer], forward: Forward) -> None:
        numbers = RowNumbers(*self._numbers.unbind())
        ancestors, _, positions, *_ = ops.tree_mask(self._parents, numbers.root_positions)
        block_slots = numbers.block_starts[0] + self._nodes
        tree = TreeBlock(
            ancestors, numbers.first_slots, numbers.lengths, numbers.block_starts, self._slots
        )
        try:
            for layer in layers:
                layer.block_slots = block_slots
            self._output = forward(self._tokens, positions, FixedBlock(tree, positions))
        finally:
            for layer in layers:
                layer.block_slots = None


class FixedBlock(BlockVisibility):
    """A block of draft trees after which layers pass all slots of an arena to ``tree_attention``."""

    def __init__(self, tree: TreeBlock, query_positions: Tensor):
        self.tree, self.query_positions = tree, query_positions

    def mask_shape(self, kv_offset: int) -> tuple[int, int, int, int]:
        assert self.tree is not None
        rows, nodes, _ = self.tree.ancestors.shape
        return rows, 1, nodes, self.tree.stop

    def mask(self, kv_offset: int, mask_function: Callable) -> NoReturn:
        raise NotRecordableError(
            "an attention layer needs a mask, because tree_attention does not support it"
        )
