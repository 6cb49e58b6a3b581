"""A step on the CPU makes few function calls.

Calls are counted in Python and C, outside of the target's pass and the draft op. A step of a small model
takes a millisecond, a call 0.1 to some microseconds.
"""

from __future__ import annotations

import sys

import pytest
import torch

import specdec_ext
from specdec_ext import assets, ops
from specdec_ext.decoding.loop import DecodingLoop
from specdec_ext.drafters import HeadDrafter, NgramDrafter
from specdec_ext.models.passes.direct.direct_pass import DirectPass
from specdec_ext.models.slots import SlotTarget
from specdec_ext.tree.config import TreeConfig

NEW_TOKENS = 64
DRAFTERS = {
    "none": lambda: None,
    "ngram": NgramDrafter,
    "chain": lambda: HeadDrafter(assets.load_head(), TreeConfig(depth=4)),
    "tree": lambda: HeadDrafter(assets.load_head()),
}
# (drafter, rows) -> limit, about a tenth above the present number.
MOST = {("none", 1): 215, ("ngram", 1): 330, ("chain", 1): 460, ("tree", 1): 465}
MOST |= {("none", 4): 300, ("ngram", 4): 495, ("chain", 4): 710, ("tree", 4): 715}


class CallCounter:
    """A profile function that counts calls from the first step to the end of the last."""

    def __init__(self) -> None:
        self.calls = self.steps = self._inside = 0
        self._stepping = False

    def __call__(self, frame, event, argument) -> None:
        code = frame.f_code
        if event == "call":
            self.steps += code is _STEP
            self._stepping = (self._stepping or code is _STEP) and code is not _END
            self._inside += code in _ARITHMETIC
        elif event == "return":
            self._inside -= code in _ARITHMETIC
        if self._stepping and not self._inside and event in ("call", "c_call"):
            self.calls += 1


_STEP, _END = DecodingLoop._propose.__code__, SlotTarget.finish.__code__
_ARITHMETIC = {DirectPass.__call__.__code__, ops.draft_head.__code__}


@pytest.fixture(scope="module")
def target():
    return assets.load_target()


@pytest.mark.parametrize(("name", "rows"), MOST)
def test_step_makes_few_calls(name, rows, target):
    tokenizer, drafter = assets.load_tokenizer(), DRAFTERS[name]()
    texts = [tokenizer(each["prompt"]).input_ids[:80] for each in assets.held_out_prompts()]
    prompt = torch.tensor([text for text in texts if len(text) == 80][:rows])

    def generate():
        kwargs = dict(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0)
        specdec_ext.generate(target, prompt, drafter=drafter, speculation="fixed", **kwargs)

    generate()  # the first pass of a model is computed twice
    counter = CallCounter()
    sys.setprofile(counter)
    try:
        generate()
    finally:
        sys.setprofile(None)
    assert len(prompt) == rows and counter.steps > NEW_TOKENS // 16
    assert counter.calls / counter.steps < MOST[name, rows]
