"""``kv_compact``: rollback of the key-value cache to the accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """Move the accepted slots of a tree to the front of its block, in place, in all caches.

    For d = 0, ..., ``num_accepted[b]``, slot ``target_starts[b] + d`` gets the previous contents of slot
    ``source_starts[b] + path[b, d]``. The ranges may overlap.

    Args:
        caches: keys and values of all layers, each ``[batch, heads, slots, head_dim]`` of any dtype with a
            contiguous last dimension; heads, slots, head_dim and dtype may differ between tensors. With a
            page table, pools of pages, ``[pages, heads, page_size, head_dim]``, all with the same page size.
        path: ``[batch, nodes]`` int64, as from :func:`verify_match`.
        num_accepted: ``[batch]`` int64; -1 moves nothing.
        source_starts: ``[batch]`` int64; the slot of node 0.
        target_starts: ``[batch]`` int64; the slot to which node ``path[b, 0]`` moves.
        page_table: ``[batch, pages]`` int64 or None; slot s of row b is slot ``s % page_size`` of page
            ``page_table[b, s // page_size]``. A page into which a row moves something must not be in another
            row's table; pages that are only read may be shared. Entries that no slot needs are not read.

    Raises:
        ValueError: for an invalid argument. A slot or page outside a cache is an error on the CPU, before
            anything is written; on CUDA the numbers stay on the device, and such a move is skipped.
    """
    _library.native.kv_compact(caches, path, num_accepted, source_starts, target_starts, page_table)


@torch.library.register_fake("specdec::kv_compact")
def _kv_compact_fake(*_: Any) -> None:
    return None
