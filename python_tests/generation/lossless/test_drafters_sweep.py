"""Drafters without a model of their own have the text of plain decoding on every architecture.

Cases: paddings on the left and on the right, a processor that reads the text, and a second turn with one
cache. The tests of each drafter go deeper on one architecture.
"""

from __future__ import annotations

import pytest
import torch
from helpers.drafters.every_drafter import GENERAL
from helpers.models.tiny import ARCHITECTURES, prompts, tiny_model
from transformers import DynamicCache

import specdec_ext

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*in the last")]

CASES = {
    "left": ("left", {"do_sample": False}),
    "right": ("right", {"do_sample": False}),
    "penalty": ("left", {"do_sample": True, "seed": 5, "repetition_penalty": 1.2}),
}

every_drafter = pytest.mark.parametrize("drafter", GENERAL.values(), ids=GENERAL.keys())
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@every_architecture
@every_drafter
def test_text_is_that_of_plain_decoding(drafter, name, case):
    side, options = case
    ids, mask = prompts((12, 3, 9, 5, 12), side=side)
    options = dict(options, attention_mask=mask, max_new_tokens=24)
    expected = specdec_ext.generate(tiny_model(name), ids, drafter=None, **options)
    actual = specdec_ext.generate(tiny_model(name), ids, drafter=drafter(), **options)
    assert torch.equal(actual, expected)


@every_architecture
@every_drafter
def test_second_turn_is_that_of_plain_decoding(drafter, name):
    texts = []
    for each in (None, drafter()):
        cache, text = DynamicCache(), prompts((9, 9))[0]
        for turn in range(2):
            text = torch.cat([text, prompts((4, 4), seed=turn)[0]], dim=1)
            kwargs = dict(past_key_values=cache, max_new_tokens=9, do_sample=False)
            text = specdec_ext.generate(tiny_model(name), text, drafter=each, **kwargs)
        texts.append(text)
    assert torch.equal(*texts)
