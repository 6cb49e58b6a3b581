"""``NgramDrafter``: what it drafts on a device equals what its indices draft on the host."""

import torch
from helpers.drafters.drafting_contexts import context_of, started
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_ext import NgramDrafter

TOKENS = st.integers(0, 3)
TEXTS = st.lists(st.lists(TOKENS, min_size=2, max_size=40), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    TEXTS, st.integers(1, 12), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4), st.data()
)
def test_a_device_drafts_what_the_host_drafts(texts, num_tokens, shortest, more, branches, data):
    """In every round, from the columns of the text, paddings included."""
    drafter = NgramDrafter(num_tokens, shortest, shortest + more, branches)
    context = context_of(texts)
    padded = (context.attention_mask == 0).sum(1)
    started(drafter, context)
    for _ in range(3):
        expected = drafter.propose(context)
        lengths = torch.tensor([context.columns(row) for row in context.rows])
        draft = drafter.draft(context.sequences(), lengths, padded)
        assert torch.equal(draft.tokens, expected.tokens)
        assert torch.equal(draft.parents, expected.parents)
        assert draft.match_lengths.tolist() == drafter.match_lengths
        for row in context.rows:
            context.extend(row, data.draw(st.lists(TOKENS, max_size=5)))
