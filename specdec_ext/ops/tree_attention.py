"""``tree_attention``: attention of the target over draft trees, and the limits of its kernels."""

from __future__ import annotations

from typing import Any

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
    """Attend from every node of a draft tree to the committed tokens, its ancestors and itself.

    In row b, the committed token at position p (0 to ``prefix_lengths[b] - 1``) is in slot
    ``prefix_starts[b] + p``, and node n is in slot ``block_starts[b] + n``. A node at depth d has position
    ``prefix_lengths[b] + d``. All sums are accumulated in float32.

    The output of a node depends only on the ordered list of (position, key, value) that it sees. The batch,
    the number of nodes, the other nodes, the places of the slots and the capacity of the cache do not change
    a single bit. So a node has exactly the bits of plain decoding along its path. This is true on the CPU,
    where all numbers of threads and all instruction sets give the same bits, and on CUDA. For bfloat16 and a
    ``head_dim`` that is a multiple of 32, at most 256, the CPU rounds weights to bfloat16 and multiplies
    numbers in pairs. Then matrix units (AMX) have bits of their own, and processors with ``avx512_bf16``
    treat subnormal numbers as zero. The contents of slots that a node does not see have no effect, even if
    they are NaN, with one exception on CUDA: NaN in a value that a window hides from some nodes of a row, but
    not from others, affects all of them.

    On CUDA the numbers in ``ancestors``, ``prefix_starts``, ``prefix_lengths``, ``block_starts`` and
    ``page_table`` are read by the kernels, and the launches depend on shapes alone. A CUDA graph that was
    captured once is right for all later contents of these tensors.

    Args:
        query: ``[batch, heads, nodes, head_dim]`` float32, bfloat16 or float16. On CUDA at most 128 nodes,
            a head_dim of at most 256 and at most 16 query heads per key-value head
            (:func:`tree_attention_refusal`); every row of query, key and value fills a multiple of 16 bytes
            and begins at one.
        key: ``[batch, kv_heads, slots, head_dim]`` of the same dtype, or with ``page_table`` a pool
            ``[num_pages, kv_heads, page_size, head_dim]``. kv_heads divides heads; query head h uses
            key head ``h // (heads // kv_heads)``. The last dimension is contiguous; other strides are free.
        value: like ``key``; its strides may differ.
        ancestors: ``[batch, nodes, ceil(nodes / 64)]`` int64, packed bits as from :func:`tree_mask`. A
            node without bits is inactive.
        prefix_starts: ``[batch]`` int64; may be negative if a window hides the positions before slot 0.
        prefix_lengths: ``[batch]`` int64.
        block_starts: ``[batch]`` int64; at least ``prefix_starts + prefix_lengths``. The contents of the
            slots between are arbitrary.
        page_table: ``[batch, pages]`` int64; slot s of row b is slot ``s % page_size`` of page
            ``page_table[b, s // page_size]``. Entries that no visible slot needs are arbitrary.
        scale: factor of the dot products, usually ``head_dim ** -0.5``.
        window: a node sees only keys with query position - key position < window; 0 means all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0 leaves them unchanged.

    Returns:
        ``[batch, nodes, heads, head_dim]`` in the dtype of ``query``; zeros for an inactive node.

    Raises:
        ValueError: for an invalid argument. Slots outside the cache and pages outside the pool are checked on
            the CPU only, before anything is read; on CUDA these numbers stay on the device and must be valid.
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


def tree_attention_refusal(
    device: torch.device, dtype: torch.dtype, nodes: int, head_dim: int, group: int
) -> str | None:
    """Return why :func:`tree_attention` can't take a query of these sizes, or None if it can.

    Args:
        device: device of the tensors. Only the CUDA kernels have limits.
        dtype: dtype of the tensors.
        nodes: number of nodes per row.
        head_dim: size of a head.
        group: query heads per key-value head.
    """
    if device.type != "cuda":
        return None
    refusal: str | None = _library.native.tree_attention_refusal(
        dtype.itemsize, nodes, head_dim, group
    )
    return refusal


@torch.library.register_fake("specdec::tree_attention")
def _tree_attention_fake(query: Tensor, *_: Any) -> Tensor:
    batch, heads, nodes, head_dim = query.shape
    return query.new_empty(batch, nodes, heads, head_dim)
