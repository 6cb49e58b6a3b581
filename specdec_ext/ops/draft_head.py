"""``draft_head``: a draft with a head of the EAGLE family in one call."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library
from specdec_ext.ops.couple_logits import DraftNoise
from specdec_ext.ops.packed_head import PackedHead
from specdec_ext.tree.config import TreeConfig


class HeadDraft(NamedTuple):
    """Draft trees as in :class:`specdec_ext.DraftTree`, with scores.

    Attributes:
        tokens: ``[rows, nodes]`` int64; 0 where a node is absent.
        parents: ``[rows, nodes]`` int64; -1 for node 0, -2 where a node is absent.
        scores: ``[rows, nodes]`` float32; cumulative log-probability over the draft vocabulary, 0 for
            node 0 and -inf where a node is absent. In a row with noise, it is the estimated log-probability
            that the node is accepted, given the noise.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor


def _choices(tree: TreeConfig, device: torch.device) -> Tensor:
    """``[choices, 2]``: (parent, rank) of the nodes of a chain or static tree; empty for a dynamic tree."""
    return torch.tensor(tree.links, dtype=torch.long, device=device).view(-1, 2)


def _levels(tree: TreeConfig) -> tuple[list[int], list[int]]:
    """For each level of a chain or static tree: the number of choices up to its end, and of parents above it.

    Both lists are empty for a dynamic tree.
    """
    depths, parents = [0], []
    for parent, _ in tree.links:
        depths.append(depths[parent] + 1)
        parents.append(parent)
    levels = range(max(depths))
    ends = [sum(depth <= level + 1 for depth in depths[1:]) for level in levels]
    return ends, [sum(depths[node] == level for node in set(parents)) for level in levels]


@cache
def tree_arguments(tree: TreeConfig, device: torch.device) -> tuple[Any, ...]:
    """The arguments of the op from ``choices`` to ``widths``."""
    return _choices(tree, device), tree.levels, tree.top_k, tree.num_nodes, *_levels(tree)


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
    noise: DraftNoise | None = None,
    phase_launches: bool = False,
) -> HeadDraft:
    """Add the committed elements to a head's cache and draft a tree after them; on CUDA in one launch.

    The specification is :func:`specdec_ext.reference.draft_head.draft_head`. A row of the result depends only
    on that row. It has the same bits in any batch, with any number of threads, and for its elements in one
    call or in several. Products accumulate in float32; norms, rotation, softmax and logits are float32; the
    input of each product is rounded to the dtype once.

    :func:`specdec_ext.ops.draft_head_refusal` checks the limits of a device. On CUDA, rows of features, keys
    and values must begin at multiples of 16 bytes. The host reads nothing from CUDA memory, so a row with a
    count, length, position, root, token or ``draft_to_target`` entry out of range gets only its root, with
    score NaN.

    Args:
        head: a head from :meth:`PackedHead.pack`, with the dtype of features, keys and values.
        cosines: ``[positions, rotary / 2]`` float32 (:func:`specdec_ext.heads.rope.rope_tables`), for all
            positions up to that of the last level.
        sines: like ``cosines``.
        keys: ``[layers, rows, kv_heads, capacity, head_dim]``, the head's cache, written in place. New
            elements are written to slots ``lengths[r]`` and up. The slots after them are overwritten, too, by
            drafted nodes that need not be kept.
        values: like ``keys``.
        tokens: ``[rows, new]`` int64; element i of row r is ``tokens[r, i]`` with ``features[r, i]``, the
            features of the position before that token.
        features: ``[rows, new, feature_width]``, contiguous in the last dimension.
        counts: ``[rows]`` int64, number of new elements of each row; further columns are not read. A row
            without new elements gets only its root.
        lengths: ``[rows]`` int64, number of slots in use.
        positions: ``[rows]`` int64, position of the first new element.
        roots: ``[rows]`` int64, the last committed tokens.
        tree: the shape to draft. ``capacity`` must have room for the new elements and then for the expanded
            nodes, of which each level but the last has at most ``top_k``.
        noise: is added to the logits as by :func:`couple_logits`, at the positions after the root, which is
            at ``positions + counts``. None drafts without noise.
        phase_launches: on CUDA, launch each phase of the draft separately, so that profilers show the phases.
            The result has the same bits.

    Raises:
        ValueError: for an invalid argument, before anything is written; for a ``draft_to_target`` entry
            outside the target's vocabulary, possibly after the cache was written.
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
            None if noise is None else list(noise),
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
    noise: list[Tensor] | None = None,
    sync: Tensor | None = None,
    phase_launches: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (features.shape[0], nodes)
    return (
        roots.new_empty(shape),
        roots.new_empty(shape),
        torch.empty(shape, dtype=torch.float32, device=features.device),
    )
