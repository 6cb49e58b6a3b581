"""RecurrentGemma, whose modules hold recurrent states: ours are in caches, so calls are independent.

``test_architectures.py`` compares text and logits with ``model.generate``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.models import zoo
from helpers.models.tiny import ScriptedDrafter, generated, noisy_chain, prompts, random_tree
from helpers.versions import since
from transformers import DynamicCache

import specdec_ext

pytestmark = since("5.23", "RecurrentGemma with a cache of transformers' own")
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model():
    return zoo.build("recurrent_gemma")


GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


def plain_text(ids):
    """The text of transformers with a new model."""
    return zoo.build("recurrent_gemma").generate(ids, **GREEDY)


def generate(model, ids, expected, shape=noisy_chain):
    """The output with partly right drafts."""
    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
    kwargs = dict(GREEDY, speculation="fixed", return_dict_in_generate=True)
    return specdec_ext.generate(model, ids, drafter=drafter, **kwargs)


def held(model):
    """The states that the modules hold."""
    names = ("conv1d_state", "recurrent_states")
    return [getattr(m, name) for m in model.modules() for name in names if hasattr(m, name)]


def test_states_of_modules_are_unchanged(model):
    before = held(model)
    ids, _ = prompts((9, 9))
    expected = plain_text(ids)
    assert torch.equal(generate(model, ids, expected, random_tree).sequences, expected)
    after = held(model)
    assert after and all(mine is its for mine, its in zip(after, before, strict=True))


def test_prompt_of_one_token_begins_without_states(model):
    """transformers would continue from the previous text."""
    model.generate(prompts((9,))[0], max_new_tokens=3)
    ids = torch.tensor([[5]])
    expected = plain_text(ids)
    assert torch.equal(generate(model, ids, expected).sequences, expected)


def test_call_inside_another_is_independent(model):
    (outer, _), (inner, _) = prompts((9,)), prompts((7,), seed=1)
    expected, expected_inside = plain_text(outer), plain_text(inner)
    found = []

    class Interrupts(ScriptedDrafter):
        def propose(self, context):
            if not found:
                found.append(generate(model, inner, expected_inside))
            return super().propose(context)

    drafter = Interrupts(generated(expected, 9), noisy_chain)
    text = specdec_ext.generate(model, outer, drafter=drafter, speculation="fixed", **GREEDY)
    assert torch.equal(text, expected)
    assert torch.equal(found[0].sequences, expected_inside)


def test_calls_in_two_threads_are_independent(model):
    texts = [prompts((9,), seed)[0] for seed in (1, 2)]
    expected = list(map(plain_text, texts))

    def run(number):
        return [generate(model, texts[number], expected[number]).sequences for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        for number, found in enumerate(pool.map(run, range(2))):
            assert all(torch.equal(text, expected[number]) for text in found)


def test_prompt_may_be_read_in_chunks(model):
    ids, _ = prompts((11,))
    text = specdec_ext.generate(model, ids, prefill_chunk_size=2, **GREEDY)
    assert torch.equal(text, plain_text(ids))


def test_returned_cache_can_be_continued(model):
    ids, _ = prompts((9,))
    first = generate(model, ids, plain_text(ids))
    longer = torch.cat([first.sequences, prompts((4,))[0]], dim=1)
    text = specdec_ext.generate(model, longer, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(text, plain_text(longer))


def test_cache_without_states_is_refused(model):
    cache = DynamicCache(config=model.config)
    text = zoo.build("recurrent_gemma").generate(prompts((9,))[0], past_key_values=cache, **GREEDY)
    message = "holds no recurrent states, because RecurrentGemmaForCausalLM"
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(model, text, past_key_values=cache, **GREEDY)
