"""Specification of ``adjust_logits``: writes out the text of every node and adjusts its scores.

Example, n-grams of 3::

    text 5 6 7 5 6     bans 7 at the root, because 5 6 7 is in the text
    node 1 with 7      bans 5, because 6 7 5 is in the text
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.ops.adjust_logits import Adjustment
from specdec_ext.tree.draft_tree import ROOT_PARENT


def adjust_logits(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    text: Tensor,
    lengths: Tensor,
    skips: Tensor,
    penalties: Tensor,
    ngram_sizes: Tensor,
    adjustments: Tensor,
    tables: Tensor,
) -> Tensor:
    """Arguments and output are those of ``specdec_ext.ops.adjust_logits``."""
    scores = logits.to(torch.float32, copy=True)
    for row, row_parents in enumerate(parents.tolist()):
        texts: dict[int, list[int]] = {}
        for node, parent in enumerate(row_parents):
            if node == 0 and parent == ROOT_PARENT:
                texts[0] = text[row, : int(lengths[row])].tolist()
            elif node > 0 and parent in texts:
                texts[node] = [*texts[parent], int(tokens[row, node])]
        for node, columns in texts.items():
            scores_of_node = scores[row, node]
            for (kind, first, end), table in zip(adjustments.tolist(), tables, strict=True):
                if not first <= len(columns) < end:
                    continue
                if kind == Adjustment.ADD:
                    scores_of_node += table
                elif kind == Adjustment.OVERWRITE:
                    scores_of_node.copy_(torch.where(table.isnan(), scores_of_node, table))
                elif kind == Adjustment.PENALISE:
                    _penalise(scores_of_node, columns[max(int(skips[row]), 0) :], penalties[row])
                elif kind == Adjustment.BAN and ngram_sizes[row] > 0:
                    _ban(scores_of_node, columns, int(ngram_sizes[row]))
    return scores


def _penalise(scores: Tensor, columns: list[int], penalty: Tensor) -> None:
    read = _in_vocab(set(columns), scores)
    chosen = scores[read]
    scores[read] = torch.where(chosen < 0, chosen * penalty, chosen / penalty)


def _ban(scores: Tensor, columns: list[int], size: int) -> None:
    if len(columns) < size:
        return
    last = columns[len(columns) - size + 1 :]
    ngrams = [columns[i : i + size] for i in range(len(columns) - size + 1)]
    banned = {ngram[-1] for ngram in ngrams if ngram[:-1] == last}
    scores[_in_vocab(banned, scores)] = -torch.inf


def _in_vocab(tokens: set[int], scores: Tensor) -> Tensor:
    numbers = [token for token in tokens if 0 <= token < len(scores)]
    return torch.tensor(numbers, dtype=torch.long, device=scores.device)
