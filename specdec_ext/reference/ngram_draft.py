"""Specification of ``ngram_draft``: the rule of ``specdec_ext.reference.ngram`` for each row of a batch."""

from __future__ import annotations

from torch import Tensor

from specdec_ext.reference import ngram
from specdec_ext.tree.draft_tree import INACTIVE, ROOT_PARENT


def ngram_draft(
    tokens: Tensor,
    lengths: Tensor,
    nodes: int,
    min_ngram: int,
    max_ngram: int,
    num_branches: int,
    num_padded: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and outputs are those of ``specdec_ext.ops.ngram_draft``."""
    batch, capacity = tokens.shape
    tree_tokens = tokens.new_zeros(batch, nodes)
    tree_parents = tokens.new_full((batch, nodes), INACTIVE)
    match_lengths = tokens.new_zeros(batch)
    firsts = [0] * batch if num_padded is None else num_padded.tolist()
    for row, (first, end) in enumerate(zip(firsts, lengths.tolist(), strict=True)):
        if not 0 <= first < end <= capacity:
            continue
        text = tokens[row, first:end].tolist()
        drafted, parents = ngram.propose(text, min_ngram, max_ngram, nodes - 1, num_branches)
        used = 1 + len(drafted)
        tree_tokens[row, :used] = tokens.new_tensor([text[-1], *drafted])
        tree_parents[row, :used] = tokens.new_tensor([ROOT_PARENT, *parents])
        match_lengths[row] = ngram.match_length(text, min_ngram, max_ngram)
    return tree_tokens, tree_parents, match_lengths
