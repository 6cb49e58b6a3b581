"""Paddings do not change the text: each row of a batch has the text that it has without the others.

Claim (greedy, float32, exact): rows padded on the left, on the right or with masked columns between their
tokens give the tokens of HF ``model.generate`` for the row without its paddings, on every tiny architecture
(windows count tokens, not columns) and with every draft. Copies made by ``num_return_sequences`` are rows as
any others.
"""

import pytest
import torch
from helpers.models.tiny import (
    ARCHITECTURES,
    VOCAB,
    every_drafter,
    generated,
    make_drafter,
    prompts,
    tiny_model,
)
from helpers.texts.padding_cases import LAYOUTS, LENGTHS, NEW_TOKENS, alone, continued, layout

import specdec_ext

few_drafters = pytest.mark.parametrize(
    "drafter", ["none", "ngram", "self", "noisy_chain", "random_tree"]
)


@few_drafters
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padded_rows_have_their_own_text(name, kind, drafter):
    assert continued(name, *layout(kind), drafter) == alone(name)


@every_drafter
@pytest.mark.parametrize("kind", ["right", "holes"])
def test_padded_rows_end_on_their_own(kind, drafter):
    """Finished rows leave the batch while the others keep their masked columns."""
    answers = alone("mistral-window")
    eos = [answers[0][3], answers[2][6]]
    kwargs = dict(eos_token_id=eos, pad_token_id=3)
    actual = continued("mistral-window", *layout(kind), drafter, **kwargs)
    expected = []
    for row in answers:
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        expected.append(row[:end] + [3] * (len(row) - end))
    longest = len(actual[0])
    assert actual == [row[:longest] for row in expected]
    assert all(row[longest:] == [3] * (NEW_TOKENS - longest) for row in expected)


@few_drafters
def test_single_row_may_be_padded(drafter):
    ids, mask = layout("holes")
    for row, answer in enumerate(alone("gemma2-window")):
        only = slice(row, row + 1)
        actual = continued("gemma2-window", ids[only], mask[only], drafter, answers=[answer])
        assert actual == [answer]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_mask_may_have_any_dtype(dtype):
    ids, mask = layout("left")
    assert continued("llama", ids, mask.to(dtype)) == alone("llama")


def test_mask_is_inferred_from_paddings():
    """Without a mask, columns that hold the padding token are paddings, as in ``model.generate``."""
    assert continued("llama", prompts(LENGTHS)[0], None) == alone("llama")


@pytest.mark.parametrize("at_paddings", ["minus-one", "zero"])
def test_positions_that_count_tokens_are_accepted(at_paddings):
    ids, mask = layout("left")
    positions = mask.cumsum(dim=1) - 1
    if at_paddings == "zero":
        positions = positions.clamp(min=0)
    assert continued("llama", ids, mask, position_ids=positions) == alone("llama")


@few_drafters
@pytest.mark.parametrize("side", ["left", "right"])
def test_returned_sequences_are_rows_with_their_own_noise(side, drafter):
    """Copies of a prompt are neighbours, and their texts are the same for every drafter."""
    model = tiny_model("llama")
    ids, mask = prompts((6, 3), side=side)
    kwargs = dict(do_sample=True, top_k=0, seed=8, max_new_tokens=NEW_TOKENS)
    copies = dict(kwargs, attention_mask=mask, num_return_sequences=3)
    expected = specdec_ext.generate(model, ids, drafter=None, **copies)
    made = make_drafter(drafter, model, generated(expected, 6))
    actual = specdec_ext.generate(model, ids, drafter=made, **copies)
    assert torch.equal(actual, expected)
    ids, mask = ids.repeat_interleave(3, dim=0), mask.repeat_interleave(3, dim=0)
    assert torch.equal(actual[:, :6], ids)
    assert len({tuple(row) for row in generated(actual, 6)}) == 6
    repeated = specdec_ext.generate(model, ids, drafter=None, attention_mask=mask, **kwargs)
    assert torch.equal(repeated, actual)


def test_content_of_paddings_is_never_read():
    for filler in (0, 42, VOCAB - 1):
        ids, mask = layout("holes")
        ids[mask == 0] = filler
        assert continued("gemma3-window", ids, mask, "ngram") == alone("gemma3-window")
