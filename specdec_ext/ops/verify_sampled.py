"""Verification of draft tokens that were sampled from known probabilities: rules 2, 3 and 4.

What all three take and promise:

- ``draft_probs[b, n]`` is the law that the children of node n were drawn from, without replacement and
  in node order, independently of the other nodes: a chain is the case of one child. Rows need not be
  normalised; NaN, infinities and negative entries count as 0. Rows of leaves are never read.
- The law of what is emitted is then the target's, softmax of the logits. A token of target probability
  zero is never emitted, whatever ``draft_probs`` holds. A child that cannot have been drawn (its token
  outside the vocabulary, of draft probability 0, equal to an earlier sibling's) is passed over; in a
  chain it ends the chain. So does a row of draft mass outside 2^-64 .. 2^64.
- Random numbers belong to (seed, row id, position of the round's root, depth), with purposes of their own
  for accepting and for drawing the last token. The drafter's own draws use a third one
  (:func:`specdec_ext.reference.verify_sampled.draw_drafts`), or any other source. A round may not be
  verified twice with one (seed, row id, root position).

The arguments and the result are those of :func:`verify_match`, but for ``draft_probs``: ``[batch, nodes,
vocab]`` float32, contiguous in its last dimension. There is no ``stochastic``: a greedy row needs
:func:`verify_match`. On the CPU only visited nodes are read. On CUDA: two launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.ops import _library
from specdec_ext.ops.verify import MatchResult


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

    In a tree only the first child of every node is looked at.
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
    """Rule 4, for trees: siblings are tried in node order, each against what the last one left.

    Siblings must be in the order in which they were drawn, none left out because of its score.
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

    It accepts at least as many tokens in expectation as :func:`verify_rejection`. In a tree only the
    first child of every node is looked at. All nodes of the chain count as visited, up to the first
    token of target probability 0: a NaN in any of them makes the row's ``status`` 1.
    """
    packed = _library.native.verify_block(
        logits, draft_probs, tokens, parents, root_positions, seeds, row_ids
    )
    return MatchResult(packed, *parents.shape)


def _fake(
    logits: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
) -> Tensor:
    batch, nodes, _ = logits.shape
    return parents.new_empty(batch * (nodes + 3))


for _name in ("verify_rejection", "verify_recursive", "verify_block"):
    torch.library.register_fake(f"specdec::{_name}")(_fake)
