"""Specification of ``round_commit``: row by row, what is emitted, moved, gathered and written down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext.ops import MatchResult, RoundNumbers
from specdec_ext.reference.kv_compact import kv_compact
from specdec_ext.tree.draft_tree import INACTIVE


def emitted_tokens(
    walk: list[int], eos: list[int], length: int, limit: int
) -> tuple[list[int], bool]:
    """Cut the tokens of a walk at the end of the row; returns the rest, and whether the row has ended."""
    for count, token in enumerate(walk, start=1):
        if token in eos or length + count >= limit:
            return walk[:count], True
    return walk, False


def round_commit(
    caches: Sequence[Tensor],
    tokens: Tensor,
    verdict: Tensor,
    eos: Tensor,
    numbers: Tensor,
    text: Tensor,
    new_tokens: Tensor,
    ring: Tensor,
    clock: Tensor,
    features: Sequence[Tensor] = (),
    new_features: Tensor | None = None,
) -> None:
    """Arguments and effect are those of ``specdec_ext.ops.round_commit``."""
    batch, nodes = tokens.shape
    if batch == 0:
        return
    result, rows = MatchResult(verdict, batch, nodes), RoundNumbers(*numbers)
    emitted: list[list[int]] = [[] for _ in range(batch)]
    ended = [False] * batch
    if not result.status.any():
        for row, accepted in enumerate(result.num_accepted.tolist()):
            if accepted >= 0:
                drafts = tokens[row, result.path[row, 1 : accepted + 1]].tolist()
                emitted[row], ended[row] = emitted_tokens(
                    [*drafts, int(result.next_token[row])],
                    eos.tolist(),
                    int(rows.text_lengths[row]),
                    int(rows.limits[row]),
                )
    counts = torch.tensor(list(map(len, emitted)), device=tokens.device)
    kv_compact(caches, result.path, counts - 1, rows.block_starts, rows.ends)
    for row, new in enumerate(emitted):
        for i, token in enumerate(new):
            text[row, rows.text_lengths[row] + i] = token
            new_tokens[row, i] = rows.roots[row] = token
            if new_features is not None:
                node = result.path[row, i]
                new_features[row, i] = torch.cat([each[row, node] for each in features])
        if ended[row]:
            rows.root_parents[row] = INACTIVE
    for each in (rows.root_positions, rows.ends, rows.lengths, rows.text_lengths):
        each += counts
    rows.counts[:] = counts
    rows.block_starts[:] = rows.ends.max()
    padded = [[*new, *[-1] * (nodes - len(new))] for new in emitted]
    parts = [
        [int(clock[0]) + 1],
        counts,
        result.num_accepted,
        ended,
        result.status,
        padded,
        result.path,
    ]
    entry = torch.cat(
        [torch.as_tensor(part, device=ring.device).flatten().to(ring) for part in parts]
    )
    ring[clock[0] % len(ring), : len(entry)] = entry
    clock[0] += 1
