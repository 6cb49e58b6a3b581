"""Drafting with a head of the EAGLE family: one call per draft."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library
from specdec_ext.ops.packed_head import PackedHead
from specdec_ext.tree.config import TreeConfig


class HeadDraft(NamedTuple):
    """Trees as in :class:`specdec_ext.DraftTree`, with scores.

    Attributes:
        tokens: ``[rows, nodes]`` int64; 0 where a node is absent.
        parents: ``[rows, nodes]`` int64; -1 for node 0, -2 where a node is absent.
        scores: ``[rows, nodes]`` float32; cumulative log-probability over the draft vocabulary, 0 for
            node 0 and -inf where a node is absent.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor


def _choices(tree: TreeConfig, device: torch.device) -> Tensor:
    """``[choices, 2]``: (parent, rank) of the nodes of a chain or static tree, none of a dynamic one."""
    return torch.tensor(tree.links, dtype=torch.long, device=device).view(-1, 2)


def _levels(tree: TreeConfig) -> tuple[list[int], list[int]]:
    """Of a chain or static tree, for each level, the choices up to its end and the nodes with children
    above it; of a dynamic tree nothing."""
    depths, parents = [0], []
    for parent, _ in tree.links:
        depths.append(depths[parent] + 1)
        parents.append(parent)
    levels = range(max(depths))
    ends = [sum(depth <= level + 1 for depth in depths[1:]) for level in levels]
    return ends, [sum(depths[node] == level for node in set(parents)) for level in levels]


@cache
def tree_arguments(tree: TreeConfig, device: torch.device) -> tuple[Any, ...]:
    """The op's arguments from choices to widths."""
    depth = tree_depth(tree)
    return _choices(tree, device), depth, tree.top_k, tree.num_nodes, *_levels(tree)


def tree_depth(tree: TreeConfig) -> int:
    """Levels below the root; fewer than ``tree.depth`` in a chain that ``num_nodes`` cuts off."""
    return len(_levels(tree)[0]) or tree.depth


def draft_head(
    head: PackedHead,
    cosines: Tensor,
    sines: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    features: Tensor,
    counts: Tensor,
    lengths: Tensor,
    positions: Tensor,
    roots: Tensor,
    tree: TreeConfig,
    phase_launches: bool = False,
) -> HeadDraft:
    """Extend a head's cache by what was committed, and draft a tree below it: on CUDA in one launch.

    The specification is :func:`specdec_ext.reference.draft_head.draft_head`. A row of the result depends
    on that row alone and has the same bits alone, in any batch, with any number of threads, and whether its
    elements come in one call or in several. Products accumulate in float32, norms, rotation, softmax and
    logits are float32, and what goes from one product to the next is rounded to the dtype once.

    :func:`specdec_ext.ops.draft_head_refusal` tells what is outside the limits of a device. On CUDA rows of
    features, keys and values must begin at multiples of 16 bytes, and the host reads nothing from device
    memory: a row with a count, length, position, root or token out of range, or that comes to a
    ``draft_to_target`` out of range, gets its root alone, with NaN as its score.

    Args:
        head: as :meth:`PackedHead.pack` made it; its dtype is that of features, keys and values.
        cosines: ``[positions, rotary / 2]`` float32 (:func:`specdec_ext.heads.rope.rope_tables`), for all
            positions up to that of the last level.
        sines: likewise.
        keys: ``[layers, rows, kv_heads, capacity, head_dim]``, the head's cache, written in place: the
            new elements at slots ``lengths[r]`` and up. What lies behind them after the call, drafted
            nodes, is of no use.
        values: likewise.
        tokens: ``[rows, new]`` int64; element i of row r is this token with ``features[r, i]``, those of
            the position before it.
        features: ``[rows, new, feature_width]``, contiguous in the last dimension.
        counts: ``[rows]`` int64, elements that count; what lies behind them is not read. A row with none
            gets its root alone.
        lengths: ``[rows]`` int64, slots in use.
        positions: ``[rows]`` int64, position of the first new element.
        roots: ``[rows]`` int64, the last committed tokens.
        tree: what to draft. ``capacity`` must have room for the new elements and, behind them, for
            the nodes that are expanded: at most ``top_k`` for each level but the last.
        phase_launches: on CUDA, a launch for each phase of the draft, which profilers show one by one,
            instead of one for all. The result has the same bits.

    Raises:
        ValueError: naming the argument. Nothing is written then, unless ``draft_to_target`` has a token
            outside the target's vocabulary.
    """
    return HeadDraft(
        *_library.native.draft_head(
            head.weights,
            head.layout,
            head.scalars,
            cosines,
            sines,
            keys,
            values,
            tokens,
            features,
            counts,
            lengths,
            positions,
            roots,
            *tree_arguments(tree, features.device),
            head.sync,
            phase_launches,
        )
    )


@torch.library.register_fake("specdec::draft_head")
def _draft_head_fake(
    weights: list[Tensor],
    layout: list[int],
    scalars: list[float],
    cosines: Tensor,
    sines: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    features: Tensor,
    counts: Tensor,
    lengths: Tensor,
    positions: Tensor,
    roots: Tensor,
    choices: Tensor,
    depth: int,
    top_k: int,
    nodes: int,
    level_ends: list[int],
    widths: list[int],
    sync: Tensor | None = None,
    phase_launches: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (features.shape[0], nodes)
    return (
        roots.new_empty(shape),
        roots.new_empty(shape),
        torch.empty(shape, dtype=torch.float32, device=features.device),
    )
