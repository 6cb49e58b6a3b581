"""Attention masks of a block of tokens (a tree, or a padded prompt) through transformers' mask interface.

A model builds its masks with the function that is registered for its attention implementation. It calls that
function once per kind of layer, with the ``mask_function`` of the kind (causal, sliding window, ...). This
module wraps the registered function. Outside of a block pass the wrapper calls the original. Inside, the
block's visibility (``visibility.py``) evaluates the same ``mask_function``.

If ``tree_attention`` supports the rule, the mask carries the rule (``attention.py``) and is computed only
if it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
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
    with_rule,
    with_tree_attention,
)
from specdec_ext.models.passes.visibility import CURRENT, BlockVisibility, current_block
from specdec_ext.models.patching.changes import Entry, binding, joined_changes

SUPPORTED_IMPLEMENTATIONS = ("sdpa", "eager")


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


@contextmanager
def visibility(block: BlockVisibility) -> Iterator[None]:
    """Make models that are called in this thread build their masks from ``block``."""
    with joined_changes() as changes:
        changes.patch(_entries, _entries)
        with binding(CURRENT, block):
            yield


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
        block = current_block()
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
    """Return the entries that a block pass replaces in the registries of transformers.

    A registry belongs to the whole process, and other models, and code that compiles them, must find the
    original entries after a call. Outside of our own passes, and in other threads, our functions call the
    originals. Compiled code is specialised on the function in a registry, so each wrapper is made once.
    """
    masks, attention = ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS
    # Eager attention adds its mask to the scores, so a boolean mask would be silently wrong.
    wraps = {
        name: partial(_wrapped, additive=name == "eager") for name in SUPPORTED_IMPLEMENTATIONS
    }
    return [
        *((_holder(masks, name), name, wrap) for name, wrap in wraps.items()),
        (_holder(attention, IMPLEMENTATION), IMPLEMENTATION, with_tree_attention),
    ]


def _holder(registry: Any, name: str) -> MutableMapping[str, Any]:
    """Return the dict in which ``registry`` looks up ``name``."""
    local: MutableMapping[str, Any] = registry._local_mapping
    return local if name in local else registry._global_mapping
