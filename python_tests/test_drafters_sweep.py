"""Every drafter that copies, guesses or combines, on every architecture: the text of plain decoding.

One batch padded on the left, one on the right, a processor that looks at the text, and a second turn in the
same cache. The drafters' own tests go deeper, on one architecture.
"""

from __future__ import annotations

import pytest
import torch
from test_medusa import random_heads
from tiny import ARCHITECTURES, prompts, tiny_model
from transformers import DynamicCache

import specdec_ext
from specdec_ext import (
    CombinedDrafter,
    DraftModelDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    NgramDrafter,
    SuffixDrafter,
    TreeConfig,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*of the last")]

MEDUSA_TREE = TreeConfig(depth=3, top_k=3, num_nodes=9)
DRAFTERS = {
    "suffix tree": lambda: SuffixDrafter(offset=2.0),
    "suffix chain": lambda: SuffixDrafter(tree=False, offset=2.0),
    "lookahead": LookaheadDrafter,
    "medusa": lambda: MedusaDrafter(random_heads()),
    "medusa dynamic": lambda: MedusaDrafter(random_heads(), MEDUSA_TREE),
    "ngram and model": lambda: CombinedDrafter(
        NgramDrafter(min_ngram=1), DraftModelDrafter(tiny_model("qwen3")), 2, max_nodes=10
    ),
    "suffix and medusa": lambda: CombinedDrafter(SuffixDrafter(), MedusaDrafter(random_heads()), 2),
}
CASES = {
    "left": ("left", {"do_sample": False}),
    "right": ("right", {"do_sample": False}),
    "penalty": ("left", {"do_sample": True, "seed": 5, "repetition_penalty": 1.2}),
}

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
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
