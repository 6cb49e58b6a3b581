"""Paddings do not change the text: each row of a batch says what it says alone.

Claim (greedy, float32, exact): rows padded on the left, on the right or with masked columns anywhere between
their tokens give the tokens that HF ``model.generate`` gives for the row without its paddings, on every tiny
architecture (windows count tokens, not columns), whatever is drafted; left-padded batches equal HF's own.
Copies made by ``num_return_sequences`` are rows like any others.
"""

import pytest
import torch
from padding_cases import LAYOUTS, LENGTHS, NEW_TOKENS, alone, layout
from tiny import (
    ARCHITECTURES,
    DRAFTERS,
    VOCAB,
    generated,
    make_drafter,
    prompts,
    tiny_model,
)

import specdec_ext

FEW_DRAFTERS = ["none", "ngram", "self", "noisy_chain", "random_tree"]


@pytest.mark.parametrize("drafter", FEW_DRAFTERS)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_row_as_alone(name, kind, drafter):
    model = tiny_model(name)
    ids, mask = layout(kind)
    made = make_drafter(drafter, model, alone(name))
    actual = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        drafter=made,
    )
    assert torch.equal(actual[:, : ids.shape[1]], ids)
    assert generated(actual, ids.shape[1]) == alone(name)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", ["right", "holes"])
def test_rows_end_on_their_own(kind, drafter):
    """End-of-sequence ids and paddings at once: finished rows leave while the others keep their holes."""
    model = tiny_model("mistral-window")
    answers = alone("mistral-window")
    eos = [answers[0][3], answers[2][6]]
    ids, mask = layout(kind)
    actual = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=3,
        drafter=make_drafter(drafter, model, answers),
    )
    expected = []
    for row in answers:
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        expected.append(row[:end] + [3] * (len(row) - end))
    longest = actual.shape[1] - ids.shape[1]
    assert generated(actual, ids.shape[1]) == [row[:longest] for row in expected]
    assert all(row[longest:] == [3] * (NEW_TOKENS - longest) for row in expected)


@pytest.mark.parametrize("drafter", FEW_DRAFTERS)
def test_one_padded_row(drafter):
    """Batch 1 takes the same way as a batch."""
    model = tiny_model("gemma2-window")
    ids, mask = layout("holes")
    for row in range(len(LENGTHS)):
        answers = [alone("gemma2-window")[row]]
        actual = specdec_ext.generate(
            model,
            ids[row : row + 1],
            attention_mask=mask[row : row + 1],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            drafter=make_drafter(drafter, model, answers),
        )
        assert generated(actual, ids.shape[1]) == answers


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_masks_of_any_type(dtype):
    model = tiny_model("llama")
    ids, mask = layout("left")
    actual = specdec_ext.generate(
        model, ids, attention_mask=mask.to(dtype), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert generated(actual, ids.shape[1]) == alone("llama")


def test_a_mask_that_transformers_infers_from_paddings():
    """Without a mask, columns that hold the padding token are paddings, as in ``model.generate``."""
    model = tiny_model("llama")
    ids, _ = prompts(LENGTHS)
    actual = specdec_ext.generate(model, ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert generated(actual, ids.shape[1]) == alone("llama")


@pytest.mark.parametrize("given", ["counted", "zero-at-paddings"])
def test_positions_that_count_tokens_are_taken(given):
    model = tiny_model("llama")
    ids, mask = layout("left")
    positions = mask.cumsum(dim=1) - 1
    if given == "zero-at-paddings":
        positions = positions.clamp(min=0)
    actual = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        position_ids=positions,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    assert generated(actual, ids.shape[1]) == alone("llama")


@pytest.mark.parametrize("drafter", FEW_DRAFTERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_num_return_sequences(side, drafter):
    """Copies of a prompt are neighbours, each with its own noise, and the same for every drafter."""
    model = tiny_model("llama")
    ids, mask = prompts((6, 3), side=side)
    kwargs = dict(
        attention_mask=mask,
        num_return_sequences=3,
        do_sample=True,
        top_k=0,
        seed=8,
        max_new_tokens=NEW_TOKENS,
    )
    expected = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    made = make_drafter(drafter, model, generated(expected, 6))
    actual = specdec_ext.generate(model, ids, drafter=made, **kwargs)
    assert torch.equal(actual, expected)
    assert torch.equal(actual[:, :6], ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in generated(actual, 6)}) == 6
    repeated = {
        **kwargs,
        "num_return_sequences": 1,
        "attention_mask": mask.repeat_interleave(3, dim=0),
    }
    assert torch.equal(
        specdec_ext.generate(model, ids.repeat_interleave(3, dim=0), drafter=None, **repeated),
        actual,
    )


def test_the_content_of_paddings_is_never_read():
    model = tiny_model("gemma3-window")
    texts = []
    for filler in (0, 42, VOCAB - 1):
        ids, mask = layout("holes")
        ids[mask == 0] = filler
        actual = specdec_ext.generate(
            model,
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            drafter=specdec_ext.NgramDrafter(min_ngram=1),
        )
        texts.append(generated(actual, ids.shape[1]))
    assert texts[0] == texts[1] == texts[2] == alone("gemma3-window")
