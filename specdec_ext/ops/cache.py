"""Rollback of the key/value cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext.ops import _library


def kv_compact(
    caches: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    source_starts: Tensor,
    target_starts: Tensor,
    page_table: Tensor | None = None,
) -> None:
    """Move the accepted slots of a tree to the front of its block, in place, in all caches at once.

    For d in 0 .. ``num_accepted[b]``: slot ``target_starts[b] + d`` becomes what slot
    ``source_starts[b] + path[b, d]`` was before the call; the ranges may overlap.

    Args:
        caches: K and V of all layers, each ``[batch, heads, slots, head_dim]`` of any dtype with a
            contiguous last dimension; heads, slots, head_dim and dtype may differ between tensors. With
            a page table pools of pages, ``[pages, heads, page_size, head_dim]``, of one page size.
        path: ``[batch, nodes]`` int64, as from :func:`verify_match`.
        num_accepted: ``[batch]`` int64; -1 moves nothing.
        source_starts: ``[batch]`` int64; the slot of node 0.
        target_starts: ``[batch]`` int64; where node ``path[b, 0]`` goes.
        page_table: ``[batch, pages]`` int64 or None; slot s of row b is slot ``s % page_size`` of page
            ``page_table[b, s // page_size]``. A page into which a row moves something is in no other
            row's table; pages that are only read may be shared. Entries that no slot needs are not read.

    Raises:
        ValueError: on the CPU also for a slot or page outside a cache, before anything is written. On
            CUDA the counts stay on the device and such a move is skipped.
    """
    _library.native.kv_compact(caches, path, num_accepted, source_starts, target_starts, page_table)


@torch.library.register_fake("specdec::kv_compact")
def _kv_compact_fake(
    caches: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    source_starts: Tensor,
    target_starts: Tensor,
    page_table: Tensor | None = None,
) -> None:
    return None
