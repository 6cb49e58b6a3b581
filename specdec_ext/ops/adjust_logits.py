"""``adjust_logits``: logits processors that read the text, at every node of draft trees."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from specdec_ext.ops import _library


class Adjustment(IntEnum):
    """Kinds of adjustments.

    ADD: ``score + table[token]``.
    OVERWRITE: ``table[token]``, unless that is NaN.
    PENALISE: each token that the text has from column ``skips`` on: ``score * penalty`` if the score is
        negative, else ``score / penalty`` (Keskar et al. 2019, CTRL).
    BAN: -inf for each token with which the text would end in an n-gram that it has already.
    """

    OFF = 0
    ADD = 1
    OVERWRITE = 2
    PENALISE = 3
    BAN = 4


MAX_ADJUSTMENTS = 32


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
    """Adjust the logits of every node by the text up to the node.

    The text of a node is ``text[row, :lengths[row]]``, which ends with the root's token, followed by the
    tokens on the path from the root to the node. Adjustments apply in order, each to the scores that the one
    before left, and each to the nodes whose text has ``first`` to ``end - 1`` columns.

    All arguments are read on the device, and only shapes determine the launch, so a CUDA graph can repeat it.
    Every backend gives the same bits, in float32. Transformers' processors have these bits on the CPU; on
    CUDA, PyTorch may round a division by a number twice.

    Args:
        logits: ``[batch, nodes, vocab]`` float32, bfloat16 or float16, contiguous in the last dimension.
        tokens: ``[batch, nodes]`` int64; those of the roots are not read.
        parents: ``[batch, nodes]`` int64.
        text: ``[batch, columns]`` int64. Tokens outside the vocabulary are allowed: nothing penalises or bans
            them, but they are parts of n-grams.
        lengths: ``[batch]`` int64, number of columns of each row's text; on CUDA, values outside of
            ``[0, columns]`` are clamped.
        skips: ``[batch]`` int64, number of first columns that penalties do not read.
        penalties: ``[batch]`` float32, positive; 1 turns penalties off.
        ngram_sizes: ``[batch]`` int64, n of the n-grams; 0 turns bans off.
        adjustments: ``[count, 3]`` int64: ``Adjustment``, first, end. At most ``MAX_ADJUSTMENTS``.
        tables: ``[count, vocab]`` float32, contiguous in the last dimension: a value per token for each
            adjustment. Rows of penalties and bans are not read.

    Returns:
        ``[batch, nodes, vocab]`` float32: the scores; the logits at inactive nodes.

    Raises:
        ValueError: for an invalid argument; values outside their range are detected on the CPU only, where
            CUDA ignores the adjustment.
    """
    return _library.native.adjust_logits(
        logits,
        tokens,
        parents,
        text,
        lengths,
        skips,
        penalties,
        ngram_sizes,
        adjustments,
        tables,
    )


@torch.library.register_fake("specdec::adjust_logits")
def _adjust_logits_fake(logits: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
