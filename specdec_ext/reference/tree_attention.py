"""Specification of ``tree_attention``: which keys a node of a draft tree sees, and attention over them.

A row has a prefix of P committed tokens at positions 0 .. P - 1. A node at depth d sees the prefix, its
ancestors and itself. An ancestor at depth j has position P + j, and the node has position P + d. With a
window, it sees only the last ``window`` of these positions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ancestor_nodes(words: Tensor) -> list[int]:
    """The nodes whose bits are set in the packed words of one node, in ascending order."""
    return [
        64 * index + bit
        for index, word in enumerate(words.tolist())
        for bit in range(64)
        if word >> bit & 1
    ]


def seen_slots(
    words: Tensor, prefix_start: int, prefix_length: int, block_start: int, window: int
) -> list[int]:
    """The slots of all keys that a node sees, by position; none for an inactive node."""
    nodes = ancestor_nodes(words)
    if not nodes:
        return []
    slots = [prefix_start + position for position in range(prefix_length)]
    slots += [block_start + node for node in nodes]
    return slots[-window:] if window > 0 else slots


def tree_attention(
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
    """The output of ``specdec_ext.ops.tree_attention``, computed in the dtype of ``query``."""
    batch, heads, nodes, head_dim = query.shape
    group, page_size = heads // key.shape[1], key.shape[2]
    output = query.new_zeros(batch, nodes, heads, head_dim)
    for row in range(batch):
        start, length = int(prefix_starts[row]), int(prefix_lengths[row])
        for node in range(nodes):
            slots = torch.tensor(
                seen_slots(ancestors[row, node], start, length, int(block_starts[row]), window),
                dtype=torch.long,
                device=query.device,
            )
            if len(slots) == 0:
                continue
            page = (
                torch.full_like(slots, row)
                if page_table is None
                else page_table[row, slots // page_size]
            )
            keys = key[page, :, slots % page_size].repeat_interleave(group, dim=1)
            values = value[page, :, slots % page_size].repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,khd->hk", query[row, :, node], keys) * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            output[row, node] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return output
