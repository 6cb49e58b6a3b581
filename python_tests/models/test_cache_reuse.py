"""``keep_slots``: a returned cache, cut to its first slots, continues another text.

Claim: the text from the cut cache is that of a call without a cache, for every kind of layer that can forget;
a cache that can't is left as it was.
"""

from __future__ import annotations

import pytest
import torch
from helpers.models import zoo
from helpers.models.tiny import VOCAB, tiny_model
from transformers import DynamicCache

import specdec_ext
from specdec_ext.models.cache.reuse import keep_slots

KWARGS = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
PROMPT = 9


def generate(model, ids, drafter, **kwargs):
    mask = torch.ones_like(ids)
    return specdec_ext.generate(
        model, ids, attention_mask=mask, drafter=drafter, **KWARGS, **kwargs
    )


def tokens(seed: int, length: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mistral-window", "gemma3-window", "gemma3n-shared"]
)
@pytest.mark.parametrize("slots", [1, PROMPT - 2, PROMPT + 5, PROMPT + 11])
def test_text_from_a_cut_cache_is_that_without_one(name, slots):
    model = tiny_model(name)
    out = generate(model, tokens(1, PROMPT), "ngram")
    ids = torch.cat([out.sequences[:, :slots], tokens(2, 4)], dim=1)
    expected = generate(model, ids, None).sequences
    cache = out.past_key_values
    assert keep_slots(cache, slots) and cache.get_seq_length() == slots
    again = generate(model, ids, "ngram", past_key_values=cache)
    assert torch.equal(again.sequences, expected)


@pytest.mark.parametrize("name", ["falcon_h1", "mamba", "zamba2", "deepseek_v32"])
def test_states_and_sparse_attention_read_the_whole_text(name):
    """The last two have another text from a cache than without one, in transformers as well."""
    model = tiny_model(name) if name == "deepseek_v32" else zoo.build(name)
    out = generate(model, tokens(1, PROMPT) % zoo.VOCAB, None)
    for slots in (PROMPT, out.sequences.shape[1] - 1):
        assert not keep_slots(out.past_key_values, slots)


def test_cache_is_not_used_beyond_its_end():
    out = generate(tiny_model("llama"), tokens(1, PROMPT), None)
    assert not keep_slots(out.past_key_values, out.sequences.shape[1])


def test_windows_that_transformers_has_cut_are_not_used():
    """Its cache has dropped tokens that the window of a shorter text would contain."""
    model = tiny_model("mistral-window")
    cache = DynamicCache(config=model.config)
    out = model.generate(tokens(1, 24), past_key_values=cache, **KWARGS)
    assert not keep_slots(cache, 12)
    ids = torch.cat([out.sequences, tokens(2, 3)], dim=1)
    again = generate(model, ids, "ngram", past_key_values=cache)
    assert not keep_slots(again.past_key_values, 12)
