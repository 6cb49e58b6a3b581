"""The compiled ops, ``torch.ops.specdec.*``, as documented Python functions.

Importing this module loads the op library and registers fake (meta) implementations, so the ops work
under ``torch.compile`` and ``torch.export``. Every op has a specification in plain PyTorch under
``specdec_ext.reference`` with the same name and arguments; schemas are in ``csrc/ops/schemas.cpp``.

Shapes: ``batch`` rows, ``nodes`` per row (the root included, 1 to 1024), ``vocab`` tokens. All index
tensors are int64. ``parents[b, i] < i``; -1 is the root (node 0) and -2 an inactive node. A node whose
parent is not an earlier active node counts as inactive; a row whose node 0 is inactive is inactive.

Errors: ValueError names the argument, what was expected and what was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

MAX_NODES = 1024

STATUS_OK = 0
STATUS_NAN = 1
STATUS_NO_FINITE_LOGIT = 2


LIBRARY_PATH = Path(__file__).with_name("_ops.abi3.so")


def _load_library() -> None:
    if not LIBRARY_PATH.exists():
        raise ImportError(
            f"specdec_ext's op library was not built: {LIBRARY_PATH} does not exist. "
            "Build it with `pip install --no-build-isolation -e .` in the source tree."
        )
    try:
        torch.ops.load_library(LIBRARY_PATH)
    except OSError as error:
        raise ImportError(
            f"specdec_ext's op library {LIBRARY_PATH} does not load under torch "
            f"{torch.__version__}: {error}. "
            "It needs torch >= 2.10 and the platform it was built on; rebuild it with "
            "`pip install --no-build-isolation --force-reinstall --no-deps .`"
        ) from error


_load_library()


class TreeMask(NamedTuple):
    """The shape of a batch of draft trees.

    Attributes:
        ancestors: ``[batch, nodes, ceil(nodes / 64)]``; bit ``m % 64`` of word ``m // 64`` is set iff
            node m is the node itself or an ancestor of it. 0 for an inactive node.
        depths: ``[batch, nodes]``; 0 for the root, -1 for an inactive node.
        positions: ``[batch, nodes]``; root position + depth. An inactive node has its row's root
            position, so that it is always a legal index.
        first_child: ``[batch, nodes]``; -1 if none.
        next_sibling: ``[batch, nodes]``; siblings in ascending node order, -1 after the last.
        paths: ``[batch, nodes, nodes]``; ``paths[b, n, d]`` is the ancestor of n at depth d, n itself
            at its own depth, -1 beyond and for inactive nodes.
    """

    ancestors: Tensor
    depths: Tensor
    positions: Tensor
    first_child: Tensor
    next_sibling: Tensor
    paths: Tensor


class MatchResult(NamedTuple):
    """What a verification step accepted.

    Attributes:
        path: ``[batch, nodes]``; the visited node at depth d for d <= num_accepted (node 0 first),
            -1 beyond.
        num_accepted: ``[batch]`` accepted draft tokens; -1 for an inactive row.
        next_token: ``[batch]``; the bonus token at a leaf, the correction elsewhere; -1 for an inactive
            row or where ``status`` is not 0.
        status: ``[batch]``; 0 ok, 1 the logits of the visited node contain NaN, 2 none of them is above
            -inf. Then ``path`` and ``num_accepted`` are what was walked before that node.
    """

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    status: Tensor


def tree_mask(parents: Tensor, root_positions: Tensor) -> TreeMask:
    """Derive masks, depths, positions, child links and paths from the parents of draft trees.

    Args:
        parents: ``[batch, nodes]`` int64.
        root_positions: ``[batch]`` int64; the position of node 0 of each row.
    """
    return TreeMask(*torch.ops.specdec.tree_mask(parents, root_positions))


def verify_match(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
    stochastic: Tensor,
) -> MatchResult:
    """Walk each tree along tokens drawn from the target: rule 1, "match", exact for every tree.

    At the visited node, starting at the root, one token is picked: the arg-max of the processed logit
    plus Gumbel noise (greedy: no noise), ties to the lowest token id. The first child that carries it
    is descended into; without one the pick is ``next_token`` and the walk ends. The noise belongs to
    (seed, row id, absolute position, token), so it does not depend on the tree.

    Args:
        logits: ``[batch, nodes, vocab]`` float32, bfloat16 or float16: the target's logits after all
            processors. The last dimension is contiguous. On the CPU only visited nodes are read; what
            the others hold never matters.
        tokens: ``[batch, nodes]`` int64.
        parents: ``[batch, nodes]`` int64.
        root_positions: ``[batch]`` int64; how many unpadded tokens precede the root. The token drawn
            at depth d has position ``root_positions + d + 1``.
        seeds: ``[batch]`` int64.
        row_ids: ``[batch]`` int64; which stream of its seed a row uses.
        stochastic: ``[batch]`` bool; False is greedy.
    """
    return MatchResult(
        *torch.ops.specdec.verify_match(
            logits, tokens, parents, root_positions, seeds, row_ids, stochastic
        )
    )


def kv_compact(
    caches: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    source_starts: Tensor,
    target_starts: Tensor,
) -> None:
    """Move the accepted slots of a tree to the front of its block, in place, in all caches at once.

    For d in 0 .. ``num_accepted[b]``: slot ``target_starts[b] + d`` becomes what slot
    ``source_starts[b] + path[b, d]`` was before the call; the ranges may overlap.

    Args:
        caches: K and V of all layers, each ``[batch, heads, slots, head_dim]`` of any dtype with a
            contiguous last dimension; heads, slots, head_dim and dtype may differ between tensors.
        path: ``[batch, nodes]`` int64, as from :func:`verify_match`.
        num_accepted: ``[batch]`` int64; -1 moves nothing.
        source_starts: ``[batch]`` int64; the slot of node 0.
        target_starts: ``[batch]`` int64; where node ``path[b, 0]`` goes.

    Raises:
        ValueError: on the CPU also for a slot outside a cache, before anything is written. On CUDA the
            counts stay on the device and such a move is skipped.
    """
    torch.ops.specdec.kv_compact(caches, path, num_accepted, source_starts, target_starts)


@torch.library.register_fake("specdec::tree_mask")
def _tree_mask_fake(parents: Tensor, root_positions: Tensor) -> tuple[Tensor, ...]:
    batch, nodes = parents.shape
    like_nodes = [parents.new_empty(batch, nodes) for _ in range(4)]
    ancestors = parents.new_empty(batch, nodes, (nodes + 63) // 64)
    return ancestors, *like_nodes, parents.new_empty(batch, nodes, nodes)


@torch.library.register_fake("specdec::verify_match")
def _verify_match_fake(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
    stochastic: Tensor,
) -> tuple[Tensor, ...]:
    batch, nodes, _ = logits.shape
    return parents.new_empty(batch, nodes), *(parents.new_empty(batch) for _ in range(3))


@torch.library.register_fake("specdec::kv_compact")
def _kv_compact_fake(
    caches: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    source_starts: Tensor,
    target_starts: Tensor,
) -> None:
    return None
