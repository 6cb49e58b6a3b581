"""Presence and frequency penalties: OpenAI's definition, and the text of transformers' loop with drafts."""

from __future__ import annotations

import pytest
import torch
from helpers.models.tiny import BATCHES, generated, make_drafter, prompts, tiny_model
from transformers import LogitsProcessorList

import specdec_ext
from specdec_ext.keyword_table import Reads
from specdec_ext.keywords import reads_of
from specdec_ext.verify.penalties import OccurrencePenalties


def test_scores_follow_the_definition():
    """mu[j] - count(j) * frequency - (count(j) > 0) * presence, over emitted tokens only."""
    ids = torch.tensor([[3, 3, 5, 1, 5], [0, 0, 2, 2, 2]])
    scores = torch.zeros(2, 6)
    got = OccurrencePenalties(0.5, 0.25, prompt_columns=2)(ids, scores)
    assert got[0].tolist() == [0, -0.75, 0, 0, 0, -1.0]  # 3 is in the prompt only
    assert got[1].tolist() == [0, 0, -0.5 - 3 * 0.25, 0, 0, 0]
    assert not scores.any()  # the input is left as it is


def test_before_the_first_token_nothing_changes():
    scores = torch.randn(1, 6)
    ids = torch.tensor([[1, 2]])
    assert torch.equal(OccurrencePenalties(1.0, 1.0, prompt_columns=2)(ids, scores), scores)


def test_rows_need_not_advance_together():
    assert reads_of(OccurrencePenalties(1.0, 0.0, 3)) is Reads.PREFIX


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("drafter", ["none", "self", "noisy_chain", "random_tree"])
@pytest.mark.parametrize("presence, frequency", [(0.7, 0.3), (-0.4, 0.1)])
def test_text_is_that_of_plain_decoding(batch, drafter, presence, frequency):
    model, (ids, mask) = tiny_model("llama"), prompts(BATCHES[batch])
    columns = ids.shape[1]
    kwargs = dict(attention_mask=mask, max_new_tokens=16, do_sample=False)

    def penalties():
        return LogitsProcessorList([OccurrencePenalties(presence, frequency, columns)])

    expected = model.generate(ids, logits_processor=penalties(), **kwargs)
    assert not torch.equal(expected, model.generate(ids, **kwargs))  # they have an effect here
    made = make_drafter(drafter, model, generated(expected, columns))
    got = specdec_ext.generate(model, ids, drafter=made, logits_processor=penalties(), **kwargs)
    assert torch.equal(got, expected)
