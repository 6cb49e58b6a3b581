"""Choose the draft vocabulary: the tokens of the target's vocabulary that a head drafts most often."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext.training.data.batches import Example

# A head drafts the third token of a text at the earliest: after the first token and the one that the target
# adds.
_FIRST_DRAFTED = 2


def draft_vocabulary(examples: Sequence[Example], size: int, vocab_size: int) -> Tensor:
    """Return the ``size`` most frequent tokens among those that a head is trained to draft.

    Only tokens in the loss mask are counted, as in EAGLE-3. Among equally frequent tokens, including those
    that do not occur, the smaller ids are chosen.

    Args:
        examples: the training texts.
        size: size of the draft vocabulary.
        vocab_size: rows of the target's output head.

    Returns:
        ``[size]`` int64 ids in the target's vocabulary, ascending; used as ``draft_to_target``.

    Raises:
        ValueError: for a size outside 1 to ``vocab_size``, a token outside the target's vocabulary, or texts
            without a token to draft.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"the size of the draft vocabulary is {size}; expected 1 to {vocab_size}, the size of the "
            "target's vocabulary"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64, device="cpu")
    for example in examples:
        drafted = example.tokens[_FIRST_DRAFTED:][example.loss_mask[_FIRST_DRAFTED:]]
        if not len(drafted):
            continue
        if not 0 <= int(drafted.min()) <= int(drafted.max()) < vocab_size:
            raise ValueError(
                f"a text has token ids {int(drafted.min())} to {int(drafted.max())}, but the target's "
                f"vocabulary has {vocab_size} tokens; use the target's own tokenizer"
            )
        counts += torch.bincount(drafted, minlength=vocab_size)
    if not counts.any():
        raise ValueError(
            f"the {len(examples)} texts have no token to draft, because all are too short or have an empty "
            "loss mask; pass longer texts, or chats with assistant turns"
        )
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
