"""Outputs of models whose caches do not only hold keys and values in slots.

Claim: the caller's cache holds the text, also where drafts are rolled back with copies; finished rows of a
batch have read their last token and paddings, as in transformers; attentions are those of the layers with
attention, each with its own window.
"""

import pytest
import torch
from helpers.models import zoo
from helpers.models.tiny import ScriptedDrafter, noisy_chain, prompts
from transformers import DynamicCache

import specdec_ext
from specdec_ext.models import supports

NEW_TOKENS = 10


def generate(model, ids, answers, **kwargs):
    """Our output, with drafts from ``answers``, or without answers that of transformers."""
    kwargs |= dict(max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
    if answers is None:
        return model.generate(ids, **kwargs)
    drafter = ScriptedDrafter(answers[:, ids.shape[1] :].tolist(), noisy_chain)
    return specdec_ext.generate(model, ids, drafter=drafter, speculation="fixed", **kwargs)


def test_callers_cache_holds_the_text():
    """A rollback copies states back into it, and a second call continues with it."""
    model = zoo.build("deepseek_v4")
    assert supports(model).rollback == "snapshot"
    ids, _ = prompts((9,))
    given, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    plain = generate(model, ids, None, past_key_values=theirs)
    ours = generate(model, ids, plain.sequences, past_key_values=given)
    assert torch.equal(ours.sequences, plain.sequences)
    stats = ours.speculation_stats
    assert stats.accepted_tokens < stats.draft_tokens, "nothing was rolled back"
    assert ours.past_key_values is given
    longer = torch.cat([plain.sequences, ids[:, :4]], dim=1)
    expected = generate(model, longer, None, past_key_values=theirs).sequences
    assert torch.equal(generate(model, longer, None, past_key_values=given).sequences, expected)


def test_finished_rows_read_paddings_as_in_transformers():
    model = zoo.build("minimax")
    assert not supports(model).batch
    ids, _ = prompts((10, 10, 10))
    free = generate(model, ids, None)
    eos = int(free.sequences[0, 13])
    ends = {"eos_token_id": eos, "pad_token_id": 5}
    plain = generate(model, ids, None, **ends)
    assert (plain.sequences == 5).any(), "no row ended early"
    with pytest.warns(UserWarning, match="without speculation in a batch of 3"):
        ours = generate(model, ids, plain.sequences, **ends)
    assert torch.equal(ours.sequences, plain.sequences)
    layers = zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True)
    compared = 0
    for mine, their in layers:
        if getattr(their, "keys", None) is not None:
            # Our linears sum in another order; a token that was not read changes whole keys.
            torch.testing.assert_close(mine.keys, their.keys, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared


@pytest.mark.parametrize("name", ["lfm2_moe", "nemotron_h", "gemma4_text+shared", "deepseek_v4"])
def test_attentions_are_those_of_transformers(name):
    """Layers without attention have none; layers that read keys of other layers have their own."""
    model = zoo.build(name)
    model.set_attn_implementation("eager")
    ids, _ = prompts((9,))
    plain = generate(model, ids, None, output_attentions=True)
    ours = generate(model, ids, plain.sequences, output_attentions=True)
    assert torch.equal(ours.sequences, plain.sequences)
    for mine, their in zip(ours.attentions, plain.attentions, strict=True):
        assert len(mine) == len(their) > 0
        for layer, expected in zip(mine, their, strict=True):
            torch.testing.assert_close(layer, expected)
