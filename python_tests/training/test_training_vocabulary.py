"""A draft vocabulary has the most frequent drafted tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from specdec_ext.training.data.batches import Example
from specdec_ext.training.data.vocabulary import draft_vocabulary


def example(tokens, mask=None):
    tokens = torch.tensor(tokens, dtype=torch.int64)
    return Example(
        tokens, torch.tensor(mask) if mask else torch.ones(len(tokens), dtype=torch.bool)
    )


def test_masked_tokens_from_the_third_on_are_counted():
    """The first token belongs to the text and the second one is the target's; neither is drafted."""
    text = example([9, 9, 4, 4, 7, 5, 5, 5], [True] * 5 + [False] * 3)
    vocabulary = draft_vocabulary([text, example([9]), example([9, 9])], 2, 12)
    assert vocabulary.tolist() == [4, 7]


def test_ties_go_to_the_smallest_ids():
    text = example([0, 0, 8, 3, 6, 5, 5])
    assert draft_vocabulary([text], 2, 10).tolist() == [3, 5]
    assert draft_vocabulary([text], 6, 10).tolist() == [0, 1, 3, 5, 6, 8]
    assert draft_vocabulary([text], 10, 10).tolist() == list(range(10))


def test_vocabulary_equals_a_plain_count():
    torch.manual_seed(0)
    texts = [
        Example(torch.randint(50, (n,)).clamp(max=40), torch.rand(n) < 0.5)
        for n in torch.randint(1, 60, (40,)).tolist()
    ]
    counts = Counter(
        int(token)
        for text in texts
        for token, learnt in list(zip(text.tokens, text.loss_mask, strict=True))[2:]
        if learnt
    )
    wanted = sorted(range(50), key=lambda token: (-counts[token], token))[:13]
    vocabulary = draft_vocabulary(texts, 13, 50)
    assert vocabulary.tolist() == sorted(wanted)
    assert vocabulary.dtype == torch.int64


def test_invalid_arguments_are_refused():
    text = example([1, 2, 3])
    for size in (0, -1, 5):
        with pytest.raises(ValueError, match=f"draft vocabulary is {size}; expected 1 to 4"):
            draft_vocabulary([text], size, 4)
    with pytest.raises(ValueError, match="token ids 3 to 3, but the target's vocabulary has 3 to"):
        draft_vocabulary([text], 2, 3)
    for texts in ([], [example([1, 2])], [example([1, 2, 3], [True, True, False])]):
        with pytest.raises(ValueError, match="no token to draft"):
            draft_vocabulary(texts, 2, 4)
