"""``ngram_draft``: draft by copying what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library


class NgramDraft(NamedTuple):
    """One tree per row, and the match that it was copied after.

    Attributes:
        tokens: ``[batch, nodes]``; node 0 is the last token of the text; 0 where a node is absent.
        parents: ``[batch, nodes]``; -1 for node 0, -2 where a node is absent.
        match_lengths: ``[batch]``; how many of the last tokens occurred before, up to ``max_ngram``; 0 if
            fewer than ``min_ngram`` did, and nothing is drafted.
    """

    tokens: Tensor
    parents: Tensor
    match_lengths: Tensor


def ngram_draft(
    tokens: Tensor,
    lengths: Tensor,
    nodes: int,
    min_ngram: int = 2,
    max_ngram: int = 6,
    num_branches: int = 1,
    num_padded: Tensor | None = None,
) -> NgramDraft:
    """Draft what followed earlier occurrences of each row's last tokens in its own text (prompt lookup).

    The drafts are those of ``NgramDrafter``; ``specdec_ext.reference.ngram`` specifies the rule. The text is
    searched anew in every call, so the op needs no state: a call reads nothing but its tensors, waits for
    nothing, and can be part of a CUDA graph.

    Args:
        tokens: ``[batch, capacity]`` int64; the text of row b is ``tokens[b, num_padded[b] : lengths[b]]``.
            What lies outside is not read.
        lengths: ``[batch]`` int64; a row is inactive unless ``0 <= num_padded < length <= capacity``.
        nodes: number of nodes of a tree, the root included.
        min_ngram, max_ngram: smallest and largest number of the last tokens that match, 1 to 64.
        num_branches: largest number of branches of a tree; 1 drafts a chain.
        num_padded: ``[batch]`` int64; number of paddings before each text; None for none.
    """
    return NgramDraft(
        *_library.native.ngram_draft(
            tokens, lengths, nodes, min_ngram, max_ngram, num_branches, num_padded
        )
    )


@torch.library.register_fake("specdec::ngram_draft")
def _ngram_draft_fake(
    tokens: Tensor,
    lengths: Tensor,
    nodes: int,
    min_ngram: int,
    max_ngram: int,
    num_branches: int,
    num_padded: Tensor | None = None,
) -> tuple[Tensor, ...]:
    batch = len(tokens)
    return tokens.new_empty(batch, nodes), tokens.new_empty(batch, nodes), tokens.new_empty(batch)
