"""Use ``tree_attention`` through transformers' attention interface.

During a block pass the function registered for "sdpa" is wrapped. If the layer's mask follows a rule that the
op supports (causal, sliding window), the op computes attention from the tree itself, without a mask of
queries x keys. Its result for a token depends only on the tokens before it, so a token that is scored in a
tree gets the same bits as in plain decoding.

The rule is an attribute of the mask tensor. If a model computes a new mask from it, the attribute is lost and
the original function runs with the new mask. The original function also runs for layers that need something
the op does not compute (position bias, value heads of another size).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from specdec_ext import ops

IMPLEMENTATION = "sdpa"


@dataclass
class TreeBlock:
    """Arguments of ``ops.tree_attention`` for a block of draft trees after contiguous committed text.

    Attributes:
        ancestors: ``[rows, nodes, words]`` packed ancestor bits.
        prefix_starts: ``[rows]`` slot of the first token of each row.
        prefix_lengths: ``[rows]`` number of committed tokens.
        block_starts: ``[rows]`` slot of node 0, the same for all rows.
        stop: the slot after the last key that layers pass to attention, a number on the host.
    """

    ancestors: Tensor
    prefix_starts: Tensor
    prefix_lengths: Tensor
    block_starts: Tensor
    stop: int

    def __post_init__(self) -> None:
        self._starts = {0: (self.prefix_starts, self.block_starts)}

    def starts_behind(self, first: int) -> tuple[Tensor, Tensor]:
        """Return ``prefix_starts`` and ``block_starts`` relative to slot ``first``, where the keys begin."""
        if first not in self._starts:  # cached: layers with equal windows share them
            self._starts[first] = self.prefix_starts - first, self.block_starts - first
        return self._starts[first]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int
    ) -> Tensor:
        """Compute attention, ``[rows, nodes, heads, head_dim]``; keys and values end at slot ``stop``."""
        prefix_starts, block_starts = self.starts_behind(self.stop - key.shape[2])
        return ops.tree_attention(
            query,
            key,
            value,
            self.ancestors,
            prefix_starts,
            self.prefix_lengths,
            block_starts,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            window=window,
        )


# The kernels are asked once for each of the few shapes of a model.
_refusal = cache(ops.tree_attention_refusal)


def _op_covers(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the op supports these tensors."""
    _, heads, nodes, head_dim = query.shape
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and head_dim == key.shape[-1] == value.shape[-1]
        and heads % key.shape[1] == 0
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and query.device.type in ("cpu", "cuda")
        and (
            not query.is_cuda
            or _refusal(query.device, query.dtype, nodes, head_dim, heads // key.shape[1]) is None
        )
    )


@dataclass
class MaskRule:
    """The rule that a boolean mask follows: the tree block and the layer's window (0: all tokens)."""

    block: TreeBlock
    window: int


def with_rule(mask: Tensor, rule: MaskRule) -> Tensor:
    """Attach ``rule`` to the mask and return it."""
    mask.specdec_rule = rule  # type: ignore[attr-defined]
    return mask


# Arguments of the attention function that change its result and that the op does not support.
_FOREIGN = ("position_bias", "cache", "softcap")


@cache
def with_tree_attention(original: Callable) -> Callable:
    """Wrap the function registered for "sdpa": use ``tree_attention`` where it applies."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        rule: MaskRule | None = getattr(attention_mask, "specdec_rule", None)
        if (
            rule is None
            or dropout
            or any(kwargs.get(name) is not None for name in _FOREIGN)
            or not _op_covers(query, key, value)
        ):
            return original(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return rule.block.attend(query, key, value, scaling, rule.window), None

    return attention
