"""Attention masks of a block of tokens (a tree, or a padded prompt) through transformers' mask interface.

A model builds its masks with the function that is registered for its attention implementation. It calls that
function once per kind of layer, with the ``mask_function`` of the kind (causal, sliding window, ...). This
module wraps the registered function. Outside of a block pass the wrapper calls the original. Inside, it
evaluates the same ``mask_function`` at *token positions* and looks up visibility by *cache slot*, so one rule
covers full and sliding-window layers, ragged rows, padding and trees.

If ``tree_attention`` supports the rule, the mask carries the rule (``attention.py``) and is computed only
if it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec_ext.models.passes.attention import (
    IMPLEMENTATION,
    MaskRule,
    TreeBlock,
    with_rule,
    with_tree_attention,
)
from specdec_ext.models.patching.changes import Entry, binding, joined_changes
from specdec_ext.models.patching.registries import wrapped_entry

SUPPORTED_IMPLEMENTATIONS = ("sdpa", "eager")


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


class LazyMask(Tensor):
    """A boolean mask that is computed when anything but its shape, dtype and device is read.

    Most layers use the rule attached to it instead (``attention.py``). Every torch function is called with
    the computed mask, :meth:`made`, which carries the same rule.
    """

    _make: Callable[[], Tensor]
    _made: Tensor | None

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], device: torch.device, make: Callable[[], Tensor]
    ) -> LazyMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask._make, mask._made = make, None
        return mask

    def made(self) -> Tensor:
        """Return the mask as an ordinary tensor; it is computed once."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*tree_map(_made, args), **tree_map(_made, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_made, args), **tree_map(_made, kwargs or {}))


_METADATA = {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")
} | {Tensor.size, Tensor.dim}


def _made(value: Any) -> Any:
    return value.made() if isinstance(value, LazyMask) else value


_current: ContextVar[BlockVisibility | None] = ContextVar("specdec_block_visibility", default=None)


@contextmanager
def visibility(block: BlockVisibility) -> Iterator[None]:
    """Make models that are called in this thread build their masks from ``block``."""
    with joined_changes() as changes:
        changes.patch(_entries, _entries)
        with binding(_current, block):
            yield


def current_block() -> BlockVisibility | None:
    """Return the block of the current pass in this thread, or None outside of block passes."""
    return _current.get()


def unpack_ancestors(ancestors: Tensor, nodes: int) -> Tensor:
    """Unpack ``[rows, nodes, words]`` bits to ``[rows, nodes, nodes]`` bool with a true diagonal.

    The diagonal keeps the softmax of inactive nodes defined; their result is not used.
    """
    bits = torch.arange(64, device=ancestors.device)
    block = ((ancestors[..., None] >> bits) & 1).bool().flatten(2)[..., :nodes]
    return block | torch.eye(nodes, dtype=torch.bool, device=ancestors.device)


def causal_window(mask_function: Callable) -> int | None:
    """Return the window of a causal mask function, 0 for none; None for any other function.

    transformers builds mask functions as closures, so they are recognised by their code objects.
    """
    if mask_function is causal_mask_function:
        return 0
    template = sliding_window_causal_mask_function(1)
    if _code(mask_function) is not _code(template):
        return None
    match _captured(mask_function), _captured(template):
        case (overlay, causal), (known_overlay, _):
            if causal is causal_mask_function and _code(overlay) is _code(known_overlay):
                return _captured(overlay)
    return None


def _code(function: Callable) -> Any:
    return getattr(function, "__code__", None)


def _captured(function: Callable) -> Any:
    """Return the single variable that a closure captured, or None."""
    cells: Any = getattr(function, "__closure__", None) or ()
    return cells[0].cell_contents if len(cells) == 1 else None


@cache
def _wrapped(original: Callable, additive: bool) -> Callable:
    def block_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable = causal_mask_function,
        **kwargs: Any,
    ) -> Tensor | None:
        block = _current.get()
        # A bidirectional mask is not over the cache but, for example, over encoder outputs.
        if block is None or mask_function is bidirectional_mask_function:
            return original(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **kwargs
            )
        if block.window is not None and mask_function is causal_mask_function:
            mask_function = sliding_window_causal_mask_function(block.window)
        block.consulted = True
        shape = block.mask_shape(kv_offset)
        if shape[2:] != (q_length, kv_length):
            raise RuntimeError(
                f"the model requested a mask of {q_length} queries x {kv_length} keys, but its cache layer "
                f"has {shape[2:]}; this model uses its cache in an unsupported way. Pass drafter=None or use "
                "model.generate"
            )
        if additive:
            # Not the lowest number, as in transformers: in float16, a score of 65504 would turn it into 0.
            allowed = block.mask(kv_offset, mask_function)
            return torch.where(allowed, 0.0, -torch.inf).to(kwargs.get("dtype", torch.float32))
        window = causal_window(mask_function)
        if block.tree is None or window is None:
            return block.mask(kv_offset, mask_function)
        rule = MaskRule(block.tree, window)

        def make() -> Tensor:
            return with_rule(block.mask(kv_offset, mask_function), rule)

        if torch.compiler.is_compiling():  # the compiler can't trace a lazy mask
            return make()
        return with_rule(LazyMask(shape, block.query_positions.device, make), rule)

    return block_mask


def _entries() -> list[Entry]:
    """Return the registry entries that a block pass replaces."""
    masks, attention = ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS
    # Eager attention adds its mask to the scores, so a boolean mask would be silently wrong.
    wraps = {
        name: partial(_wrapped, additive=name == "eager") for name in SUPPORTED_IMPLEMENTATIONS
    }
    return [
        *(wrapped_entry(masks, name, wrap) for name, wrap in wraps.items()),
        wrapped_entry(attention, IMPLEMENTATION, with_tree_attention),
    ]
