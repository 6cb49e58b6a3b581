"""``ngram_draft`` proposes what the index of the host proposes, for random texts and rules."""

import pytest
import torch
from helpers.ops.op_cases import DEVICES, assert_same, to
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_ext._host import NgramIndex

from specdec_ext import ops

NAMES = ops.NgramDraft._fields
UNUSED = -(2**40)  # around the text; it must not be read


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_equals_the_index(device, data):
    texts = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=90), min_size=1, max_size=4)
    )
    min_ngram = data.draw(st.integers(1, 5))
    rule = min_ngram, data.draw(st.integers(min_ngram, 9))
    num_tokens, num_branches = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 9))
    indexes = [NgramIndex(*rule) for _ in texts]
    tokens = torch.full((len(texts), max(map(len, texts))), UNUSED)
    for row, text, index in zip(tokens, texts, indexes, strict=True):
        row[: len(text)] = torch.tensor(text)
        index.extend(row[: len(text)].numpy())
    arguments = to(device, (tokens, torch.tensor([len(text) for text in texts])))
    draft = ops.ngram_draft(*arguments, num_tokens + 1, *rule, num_branches)
    expected = NgramIndex.propose_batch(indexes, num_tokens, num_branches)
    assert_same(draft[:2], map(torch.from_numpy, expected), NAMES[:2])
    assert draft.match_lengths.tolist() == [index.match_length() for index in indexes]
