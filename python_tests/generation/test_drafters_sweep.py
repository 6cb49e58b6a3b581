"""Every drafter that copies, guesses or combines, on every architecture: the text of plain decoding.

One batch padded on the left, one on the right, a processor that looks at the text, and a second turn in the
same cache. The drafters' own tests go deeper, on one architecture.
"""

from __future__ import annotations

import pytest
import torch
from every_drafter import GENERAL
from tiny import ARCHITECTURES, prompts, tiny_model
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
def test_one_turn(drafter, name, case):
    side, options = case
    ids, mask = prompts((12, 3, 9, 5, 12), side=side)
    texts = [
        specdec_ext.generate(
            tiny_model(name), ids, attention_mask=mask, drafter=each, max_new_tokens=24, **options
        )
        for each in (None, drafter())
    ]
    assert torch.equal(*texts)


@every_architecture
@every_drafter
def test_a_second_turn(drafter, name):
    texts = []
    for each in (None, drafter()):
        cache, text = DynamicCache(), prompts((9, 9))[0]
        for turn in range(2):
            text = torch.cat([text, prompts((4, 4), seed=turn)[0]], dim=1)
            text = specdec_ext.generate(
                tiny_model(name),
                text,
                drafter=each,
                past_key_values=cache,
                max_new_tokens=9,
                do_sample=False,
            )
        texts.append(text)
    assert torch.equal(*texts)
