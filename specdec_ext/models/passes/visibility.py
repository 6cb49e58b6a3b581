"""``BlockVisibility``: the slots that a block of tokens (a tree, or a padded prompt) may attend to.

The mask functions of transformers are evaluated at *token positions*, and visibility is looked up by *cache
slot*. So one rule covers full and sliding-window layers, ragged rows, padding and trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from specdec_ext.models.passes.attention import TreeBlock

# The block of the current pass in this thread; None outside of block passes.
CURRENT: ContextVar[BlockVisibility | None] = ContextVar("specdec_block_visibility", default=None)


def current_block() -> BlockVisibility | None:
    """Return the block of the current pass in this thread, or None outside of block passes."""
    return CURRENT.get()


@dataclass
class BlockVisibility:
    """Which slots the queries of one forward pass may attend to.

    Attributes:
        committed: ``[rows, start]`` bool, slots before the block that hold text of the row.
        block: ``[rows, nodes, nodes]`` bool, which nodes of the block each query sees, itself included.
        query_positions: ``[rows, nodes]`` token positions of the queries.
        key_positions: ``[rows, start + nodes]`` token positions of all slots.
        tree: the same block as arguments of ``tree_attention``, or None if a row has padding between tokens.
        consulted: whether the model has requested a mask for this block.
        columns: ``[rows, nodes]`` columns of ``sequences`` in which the queries would lie, padding counted;
            None if these are their slots. Models without ``position_ids`` count these columns.
        window: window of the cache if all its layers have one. Some models (Moshi) rely on the cache to limit
            attention to the window; in a block, the later nodes would see tokens before their window.
    """

    committed: Tensor
    block: Tensor
    query_positions: Tensor
    key_positions: Tensor
    tree: TreeBlock | None = None
    consulted: bool = False
    columns: Tensor | None = None
    window: int | None = None

    @property
    def key_columns(self) -> Tensor:
        """Columns of ``sequences`` of all slots, ``[rows, start + nodes]``."""
        rows, start = self.committed.shape
        slots = torch.arange(start + self.block.shape[1], device=self.committed.device)
        slots = slots.expand(rows, -1)
        return slots if self.columns is None else torch.cat([slots[:, :start], self.columns], dim=1)

    def texts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Group the queries by the length of the text up to them.

        Yields:
            ``rows [n]`` and ``nodes [n]`` of the queries of a group, and ``slots [n, columns]``: the slots of
            the columns up to each query, in order, padding included.
        """
        assert self.columns is not None
        start = self.committed.shape[1]
        before = torch.arange(start, device=self.committed.device) < self.columns[:, :1]
        belongs = torch.cat([before[:, None].expand(-1, self.block.shape[1], -1), self.block], -1)
        lengths = belongs.sum(-1)
        for length in lengths.unique().tolist():
            where = (lengths == length).nonzero(as_tuple=True)
            yield *where, belongs[where].nonzero()[:, 1].view(-1, length)

    def mask_shape(self, kv_offset: int) -> tuple[int, int, int, int]:
        """Shape of :meth:`mask`: ``[rows, 1, nodes, start + nodes - kv_offset]``."""
        rows, nodes = self.query_positions.shape
        return rows, 1, nodes, self.committed.shape[1] + nodes - kv_offset

    def mask(self, kv_offset: int, mask_function: Callable) -> Tensor:
        """Mask ``[rows, 1, nodes, start + nodes - kv_offset]`` bool, True where attention is allowed."""
        nodes = self.block.shape[1]
        committed = self.committed[:, None, kv_offset:].expand(-1, nodes, -1)
        allowed = torch.cat([committed, self.block], dim=-1)[:, None]
        if mask_function is causal_mask_function:
            return allowed  # every visible slot holds an ancestor, which has an earlier position
        rows = torch.arange(len(self.block), device=self.block.device)
        return allowed & mask_function(
            rows[:, None, None, None],
            torch.zeros_like(rows[:1])[None, :, None, None],
            self.query_positions[:, None, :, None],
            self.key_positions[:, None, None, kv_offset:],
        )


class SlotVisibility(BlockVisibility):
    """A block of draft trees after the slots of a cache; its tensors are computed when a model reads them.

    Args:
        tree: as in the base class.
        ancestors: ``[rows, nodes, words]`` packed ancestor bits.
        query_positions: ``[rows, nodes]`` token positions of the nodes.
        start: the slot of node 0.
        row_ends: ``[rows]`` number of slots that each row has filled.
        aligned: whether all rows have filled the same number of slots.
        slot_valid: ``[rows, slots]`` bool, False where a slot is padding.
        slot_positions: ``[rows, slots]`` number of tokens before each slot.
        window: as in the base class.
    """

    def __init__(
        self,
        *,
        tree: TreeBlock | None,
        ancestors: Tensor,
        query_positions: Tensor,
        start: int,
        row_ends: Tensor,
        aligned: bool,
        slot_valid: Tensor,
        slot_positions: Tensor,
        window: int | None,
    ):
        self.tree, self.query_positions, self.window = tree, query_positions, window
        self._ancestors, self._row_ends, self._aligned = ancestors, row_ends, aligned
        self._slot_valid, self._slot_positions = slot_valid[:, :start], slot_positions[:, :start]

    def mask_shape(self, kv_offset: int) -> tuple[int, int, int, int]:
        rows, nodes = self.query_positions.shape
        return rows, 1, nodes, self._slot_valid.shape[1] + nodes - kv_offset

    @cached_property
    def committed(self) -> Tensor:  # type: ignore[override]
        if self._aligned:
            return self._slot_valid
        slots = torch.arange(self._slot_valid.shape[1], device=self._slot_valid.device)
        return self._slot_valid & (slots < self._row_ends[:, None])

    @cached_property
    def block(self) -> Tensor:  # type: ignore[override]
        return unpack_ancestors(self._ancestors, self.query_positions.shape[1])

    @cached_property
    def key_positions(self) -> Tensor:  # type: ignore[override]
        return torch.cat([self._slot_positions, self.query_positions], dim=1)

    @cached_property
    def columns(self) -> Tensor:  # type: ignore[override]
        return self.query_positions + self._row_ends[:, None] - self.query_positions[:, :1]


def unpack_ancestors(ancestors: Tensor, nodes: int) -> Tensor:
    """Unpack ``[rows, nodes, words]`` bits to ``[rows, nodes, nodes]`` bool with a true diagonal.

    The diagonal keeps the softmax of inactive nodes defined; their result is not used.
    """
    bits = torch.arange(64, device=ancestors.device)
    block = ((ancestors[..., None] >> bits) & 1).bool().flatten(2)[..., :nodes]
    return block | torch.eye(nodes, dtype=torch.bool, device=ancestors.device)
