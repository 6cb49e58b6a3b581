"""Which part of the target's vocabulary a head drafts: the tokens that it will have to draft most often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_ext.training.batches import Example

# A head reads two tokens before it drafts the third: the first of the text, and the one that the target adds.
_FIRST_DRAFTED = 2


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a head drafts.

    Attributes:
        ids: ``[size]`` int64 ids of the target's vocabulary, ascending: ``draft_to_target``.
        coverage: share of the counted tokens that are among them.
    """

    ids: Tensor
    coverage: float


def draft_vocabulary(examples: Sequence[Example], size: int, vocab_size: int) -> DraftVocabulary:
    """The ``size`` most frequent of the tokens that a head is trained to draft.

    Counted under the loss mask, as by EAGLE-3. Of equally frequent tokens the smaller ids are taken, those
    that do not occur included.

    Args:
        examples: the training texts.
        size: tokens to draft.
        vocab_size: rows of the target's output head.

    Raises:
        ValueError: for a size that is not 1 to ``vocab_size``, a token that the target does not have, or
            texts in which there is nothing to draft.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size} tokens can't be taken from the target's {vocab_size}; expected "
            f"1 to {vocab_size}"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64, device="cpu")
    for example in examples:
        drafted = example.tokens[_FIRST_DRAFTED:][example.loss_mask[_FIRST_DRAFTED:]]
        if not len(drafted):
            continue
        if not 0 <= int(drafted.min()) <= int(drafted.max()) < vocab_size:
            raise ValueError(
                f"a text has token ids {int(drafted.min())} to {int(drafted.max())}; the target has "
                f"{vocab_size} tokens: is this its tokenizer?"
            )
        counts += torch.bincount(drafted, minlength=vocab_size)
    total = int(counts.sum())
    if not total:
        raise ValueError(
            f"the {len(examples)} texts have no token to draft: all are short or have an empty loss mask"
        )
    ids = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return DraftVocabulary(ids, int(counts[ids].sum()) / total)
