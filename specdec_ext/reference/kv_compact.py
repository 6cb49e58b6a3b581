"""Specification of ``kv_compact``: gather the accepted slots, then store them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def kv_compact(
    caches: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    source_starts: Tensor,
    target_starts: Tensor,
) -> None:
    """What ``specdec_ext.ops.kv_compact`` does, in place."""
    for row, accepted in enumerate(num_accepted.tolist()):
        if accepted < 0:
            continue
        sources = source_starts[row] + path[row, : accepted + 1]
        target = int(target_starts[row])
        for cache in caches:
            cache[row, :, target : target + accepted + 1] = cache[row][:, sources].clone()
