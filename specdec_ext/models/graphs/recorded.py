"""What is recorded: ``RecordedPass``, a forward pass, and ``RecordedRound``, a whole round around one.

Both run the model in :func:`fixed_pass`, over a fixed number of rows and nodes, at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

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

T = TypeVar("T")
# (tokens [rows, nodes], positions [rows, nodes], block) -> the output of the model's modules
Forward = Callable[[Tensor, Tensor, BlockVisibility], TargetOutput]


def fixed_pass(
    tree: DraftTree, packed: Tensor, layers: Sequence[RollbackLayer], slots: int, forward: Forward
) -> TargetOutput:
    """Score trees in a way of which only the contents of ``tree`` and ``packed`` change from pass to pass.

    Everything else (positions, ancestors, slots) is computed from them on the device.

    Args:
        tree: ``[rows, nodes]``.
        packed: ``[5, rows]``, the ``RowNumbers`` of this step.
        layers: the cache layers.
        slots: number of slots of their buffers.
        forward: runs the model.

    Raises:
        NotRecordableError: the model needs something that changes with the length of the text.
    """
    numbers = RowNumbers(*packed.unbind())
    ancestors, _, positions, *_ = ops.tree_mask(tree.parents, numbers.root_positions)
    nodes = torch.arange(tree.num_nodes, device=packed.device)
    block_slots = numbers.block_starts[0] + nodes
    block = TreeBlock(ancestors, numbers.first_slots, numbers.lengths, numbers.block_starts, slots)
    try:
        for layer in layers:
            layer.block_slots = block_slots
        return forward(tree.tokens, positions, FixedBlock(block, positions))
    finally:
        for layer in layers:
            layer.block_slots = None


class RecordedPass:
    """One forward pass of fixed shape.

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
        self._is_recorded = False

    def __call__(
        self, tree: DraftTree, numbers: Tensor, layers: Sequence[RollbackLayer], forward: Forward
    ) -> TargetOutput:
        """Score the trees; the first call records the pass and replays it.

        Args:
            tree: ``[rows, nodes]``, or fewer nodes.
            numbers, layers, forward: as in :func:`fixed_pass`. A CUDA graph calls ``forward`` only to record
                it.

        Returns:
            The output, copied, because the next replay overwrites the recorded tensors.
        """
        nodes = tree.num_nodes
        self._tokens[:, :nodes] = tree.tokens
        self._parents[:, :nodes] = tree.parents
        self._parents[:, nodes:] = INACTIVE
        self._numbers[:] = numbers
        inputs = DraftTree(self._tokens, self._parents)

        def compute() -> TargetOutput:
            return fixed_pass(inputs, self._numbers, layers, self._slots, forward)

        if not self._is_recorded:
            self._graph.run(compute)
            self._graph.record(compute)
            self._is_recorded = True
        return self._graph.run(compute).of_nodes(nodes).copied()


class RecordedRound:
    """A round of fixed shape, from the draft to what the host reads.

    Args:
        graph: what records the round.
        memory: the objects at whose addresses the round reads and writes, apart from the arena.
    """

    def __init__(self, graph: Graph, memory: Sequence[object]):
        self._graph, self._memory = graph, memory

    def uses(self, memory: Sequence[object]) -> bool:
        """Whether a round that reads and writes ``memory`` is the recorded one."""
        return len(memory) == len(self._memory) and all(
            one is other for one, other in zip(memory, self._memory, strict=True)
        )

    def run(self, compute: Callable[[], T]) -> T:
        """Do the work of the round once; the arguments and errors are those of :meth:`Graph.run`."""
        return self._graph.run(compute)

    def record(self, compute: Callable[[], object]) -> None:
        """Replay the round in the following runs, as :meth:`Graph.record`."""
        self._graph.record(compute)


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
