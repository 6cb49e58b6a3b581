"""Specification of ``kv_compact``: reads the accepted slots, then writes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_compact(
    caches: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    source_starts: Tensor,
    target_starts: Tensor,
    page_table: Tensor | None = None,
) -> None:
    """Arguments and effect are those of ``specdec_ext.ops.kv_compact``."""
    if page_table is None:
        page_table = torch.arange(len(path), device=path.device)[:, None]
    for row, accepted in enumerate(num_accepted.tolist()):
        sources = source_starts[row] + path[row, : accepted + 1]
        targets = target_starts[row] + torch.arange(accepted + 1, device=path.device)
        for cache in caches:
            page_size = cache.shape[2]
            moved = cache[page_table[row, sources // page_size], :, sources % page_size]
            cache[page_table[row, targets // page_size], :, targets % page_size] = moved
