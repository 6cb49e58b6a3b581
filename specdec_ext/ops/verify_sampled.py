"""Verification of draft tokens that were sampled from known probabilities: rules 2, 3 and 4.

All three rules have these properties:

- ``draft_probs[b, n]`` is the distribution from which the children of node n were drawn, without replacement
  and in node order, independently of the other nodes. A chain has one child per node. The distributions need
  not be normalised; NaN, infinities and negative entries count as 0. Those of leaves are never read.
- The emitted tokens have the target's distribution, the softmax of the logits. A token of target probability
  zero is never emitted, whatever ``draft_probs`` contains. A child that cannot have been drawn is skipped:
  its token is outside the vocabulary, has draft probability 0, or equals an earlier sibling's. In a chain,
  such a child ends the chain. A distribution with a sum outside 2^-64 .. 2^64 counts as zero everywhere.
- Random numbers are functions of (seed, row id, position of the round's root, depth, purpose), with one
  purpose for accepting and one for drawing the last token. The drafter may use a third purpose for its own
  draws (:func:`specdec_ext.reference.verify_sampled.draw_drafts`), or any other source. A round must not be
  verified twice with the same (seed, row id, root position).

The arguments and the result are those of :func:`verify_match`, except for ``draft_probs``: ``[batch, nodes,
vocab]`` float32, contiguous in its last dimension. There is no ``stochastic``; greedy rows need
:func:`verify_match`. On the CPU only visited nodes are read. On CUDA, a call is two launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.ops import _library
from specdec_ext.ops.verify_match import MatchResult


def verify_rejection(
    logits: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
) -> MatchResult:
    """Rule 2, for chains: accept with probability min(1, target / draft), else draw from the residual.

    In a tree, only the first child of every node is considered.
    """
    packed = _library.native.verify_rejection(
        logits, draft_probs, tokens, parents, root_positions, seeds, row_ids
    )
    return MatchResult(packed, *parents.shape)


def verify_recursive(
    logits: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
) -> MatchResult:
    """Rule 4, for trees: try siblings in node order, each against the residual that the last one left.

    Siblings must be in the order in which they were drawn, and none may be omitted because of its score.
    """
    packed = _library.native.verify_recursive(
        logits, draft_probs, tokens, parents, root_positions, seeds, row_ids
    )
    return MatchResult(packed, *parents.shape)


def verify_block(
    logits: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
) -> MatchResult:
    """Rule 3, for chains: accept the longest prefix that block verification allows.

    In expectation it accepts at least as many tokens as :func:`verify_rejection`. In a tree, only the first
    child of every node is considered. All nodes of the chain up to the first token of target probability 0
    are visited, so NaN in any of them makes the row's ``status`` 1.
    """
    packed = _library.native.verify_block(
        logits, draft_probs, tokens, parents, root_positions, seeds, row_ids
    )
    return MatchResult(packed, *parents.shape)


def _fake(
    logits: Tensor, draft_probs: Tensor, tokens: Tensor, parents: Tensor, *_: Tensor
) -> Tensor:
    batch, nodes = parents.shape
    return parents.new_empty(batch * (nodes + 3))


for _name in ("verify_rejection", "verify_recursive", "verify_block"):
    torch.library.register_fake(f"specdec::{_name}")(_fake)
