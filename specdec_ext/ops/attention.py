"""Attention of the target over a draft tree."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.ops import _library


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ancestors: Tensor,
    prefix_starts: Tensor,
    prefix_lengths: Tensor,
    block_starts: Tensor,
    page_table: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attend from every node of a draft tree to the committed tokens and to its ancestors and itself.

    Of row b, the committed token at position p (0 to ``prefix_lengths[b] - 1``) is in slot
    ``prefix_starts[b] + p`` and node n in slot ``block_starts[b] + n``. A node at depth d has position
    ``prefix_lengths[b] + d``. All accumulation is in float32.

    The output of a node depends on the ordered list of (position, key, value) that it sees and on
    nothing else: batch, number of nodes, the other nodes and where the slots lie do not change a bit of
    it, so a node equals plain decoding of its path, token by token, bit for bit. That holds on the CPU
    (for every number of threads and instruction set, which share their bits) and on CUDA. What is in
    slots that a node does not see never matters, NaN included. One exception, on CUDA: NaN in a value
    that a window hides from some nodes of a row, but not from others, reaches all of them.

    Args:
        query: ``[batch, heads, nodes, head_dim]`` float32, bfloat16 or float16. On CUDA at most 128 nodes
            and a head_dim of 64, 80, 96, 128 or 256.
        key: ``[batch, kv_heads, slots, head_dim]`` of the same dtype, or with ``page_table`` a pool
            ``[num_pages, kv_heads, page_size, head_dim]``. kv_heads divides heads; query head h uses
            key head ``h // (heads // kv_heads)``. Any strides with a contiguous last dimension.
        value: as ``key``; its strides may differ.
        ancestors: ``[batch, nodes, ceil(nodes / 64)]`` int64, packed bits as from :func:`tree_mask`. A
            node without bits is inactive.
        prefix_starts: ``[batch]`` int64; may be negative where a window keeps those positions out of
            sight.
        prefix_lengths: ``[batch]`` int64.
        block_starts: ``[batch]`` int64; at least ``prefix_starts + prefix_lengths``. Slots between hold
            anything.
        page_table: ``[batch, pages]`` int64; slot s of row b is slot ``s % page_size`` of page
            ``page_table[b, s // page_size]``. Entries that no visible slot needs may be anything.
        scale: factor of the dot products, usually ``head_dim ** -0.5``.
        window: only keys with query position - key position < window are seen; 0: all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: unchanged.

    Returns:
        ``[batch, nodes, heads, head_dim]`` in the dtype of ``query``; zeros for an inactive node.

    Raises:
        ValueError: on the CPU also for slots outside the cache and pages outside the pool, before
            anything is read. On CUDA those numbers stay on the device and must be right.
    """
    return _library.native.tree_attention(
        query,
        key,
        value,
        ancestors,
        prefix_starts,
        prefix_lengths,
        block_starts,
        page_table,
        scale,
        window,
        softcap,
    )


@torch.library.register_fake("specdec::tree_attention")
def _tree_attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ancestors: Tensor,
    prefix_starts: Tensor,
    prefix_lengths: Tensor,
    block_starts: Tensor,
    page_table: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    batch, heads, nodes, head_dim = query.shape
    return query.new_empty(batch, nodes, heads, head_dim)
