"""Models that count cache slots instead of tokens, and calls whose support depends on their length.

Claim: relative distances (Inkling) are those of each row; queries scaled by slot have the text of
transformers; cache layers that a model adds for its loops are rolled back; rotary embeddings that change with
the longest row are left to transformers unless all rows are on one side of the change; a batch that can't be
speculated on is decoded as in transformers.
"""

import contextlib
import copy

import pytest
import torch
from helpers.models import zoo
from helpers.models.tiny import (
    SIZES,
    ScriptedDrafter,
    generated,
    noisy_chain,
    oracle_tree,
    prompts,
    random_tree,
)
from helpers.versions import since
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
)

import specdec_ext
from specdec_ext.errors import NotAcceleratedError
from specdec_ext.models import support
from specdec_ext.models.compat import CACHE

NEW_TOKENS = 24


def generate(model, ids, answers=None, shape=noisy_chain, **kwargs):
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **kwargs}
    if answers is None:
        return model.generate(ids, **kwargs)
    drafter = ScriptedDrafter(answers, shape)
    return specdec_ext.generate(model, ids, drafter=drafter, **kwargs)


@pytest.mark.parametrize("shape", [noisy_chain, random_tree])
@pytest.mark.parametrize("lengths", [(9,), (6, 6), (4, 5, 2)], ids=str)
@pytest.mark.parametrize("name", ["inkling_text", "inkling2_text"])
def test_distances_are_those_of_each_row(name, lengths, shape):
    model = zoo.build(name)
    ids, mask = prompts(lengths)
    kwargs = dict(attention_mask=mask, return_dict_in_generate=True, output_logits=True)
    plain = generate(model, ids, **kwargs)
    answers = generated(plain.sequences, ids.shape[1])
    ours = generate(model, ids, answers, shape, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation_stats.drafts
    torch.testing.assert_close(ours.logits, plain.logits, atol=1e-4, rtol=1e-4)


@since("5.24", "Models that run layers in loops")
@pytest.mark.parametrize("how", [{}, {"graphs": True}, {"prefill_chunk_size": 3}], ids=str)
@pytest.mark.parametrize("lengths", [(9,), (4, 5, 2)], ids=str)
@pytest.mark.parametrize("name", ["dory", "inkling2_loop_text"])
def test_layers_that_a_loop_adds_to_the_cache_are_rolled_back(name, lengths, how):
    model = zoo.build(name)
    if name != "dory" and "graphs" in how:
        pytest.skip("passes with recurrent states are not recorded")
    ids, mask = prompts(lengths)
    kwargs = dict(attention_mask=mask, speculation="fixed", **how)
    plain = generate(model, ids, attention_mask=mask)
    answers = generated(plain, ids.shape[1])
    for shape in (noisy_chain, random_tree):
        cache = DynamicCache(config=model.config)
        ours = generate(model, ids, answers, shape, **{CACHE: cache}, **kwargs)
        assert torch.equal(ours, plain)
        assert len(cache.layers) > model.config.num_hidden_layers
        assert {layer.length for layer in cache.layers} == {plain.shape[1] - 1}


@since("5.24", "Models that run layers in loops")
def test_loops_that_only_read_the_cache_are_prepared_by_transformers():
    model = zoo.build_with("dory", {"recurrent_kv_cache_mode": "last_loop"})
    verdict = specdec_ext.supports(model)
    assert verdict.rollback == "snapshot" and "its loops but the last" in verdict.reasons[0]
    ids, _ = prompts((9,))
    plain = generate(model, ids)
    for shape in (noisy_chain, random_tree):
        assert torch.equal(generate(model, ids, generated(plain, 9), shape), plain)


@since("5.24", "Models that run layers in loops")
def test_layers_that_a_loop_adds_are_rolled_back_where_transformers_prepares(monkeypatch):
    model = zoo.build("dory")
    monkeypatch.setattr(support, "_CAUSAL_MASKS", {"no_such_function"})
    assert specdec_ext.supports(model).rollback == "snapshot"
    ids, _ = prompts((9,))
    plain = generate(model, ids)
    assert torch.equal(generate(model, ids, generated(plain, 9), noisy_chain), plain)


@since("5.24", "Models that run layers in loops")
def test_attentions_of_loops_are_refused():
    model = zoo.build("dory")
    model.set_attn_implementation("eager")
    kwargs = dict(return_dict_in_generate=True, output_attentions=True)
    with pytest.raises(NotAcceleratedError, match="runs layers in loops"):
        generate(model, prompts((9,))[0], [[1]], **kwargs)


@pytest.mark.parametrize("lengths", [(6,), (6, 4)], ids=str)
@pytest.mark.parametrize("name", ["llama4_text", "inkling_text+scaled"])
def test_queries_scaled_by_slot_have_the_text_of_transformers(name, lengths):
    """Llama 4 gets the columns; behind that length Inkling supports only chains of one row."""
    model = zoo.build(name)
    ids, mask = prompts(lengths)
    kwargs = dict(attention_mask=mask, return_dict_in_generate=True, output_logits=True)
    plain = generate(model, ids, **kwargs)
    answers = generated(plain.sequences, ids.shape[1])
    refused = name == "inkling_text+scaled" and len(lengths) > 1
    reason = pytest.warns(UserWarning, match="8 tokens on it scales attention by the cache slots")
    with reason if refused else contextlib.nullcontext():
        ours = generate(model, ids, answers, random_tree, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    assert refused or ours.speculation_stats.accepted_tokens
    torch.testing.assert_close(ours.logits, plain.logits, atol=1e-4, rtol=1e-4)


def rotated(kind: str, **rope):
    torch.manual_seed(0)
    sizes = dict(vocab_size=zoo.VOCAB, hidden_size=64, num_hidden_layers=2)
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **rope}
    fields = {**SIZES, **sizes, "max_position_embeddings": 16, "rope_parameters": rope}
    config = AutoConfig.for_model("llama", **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    zoo.spread(model)
    return model


def test_call_across_a_change_of_rotary_embeddings_is_decoded_plainly():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = rotated("longrope", original_max_position_embeddings=16, **factors)
    ids, mask = prompts((20, 6))
    free = generate(model, ids, attention_mask=mask)
    first = int(free[0, 20])
    expected = generate(model, ids, attention_mask=mask, eos_token_id=first)
    assert (expected[0, 21:] == 0).all() and expected.shape[1] > 24, (
        "the long row does not end early"
    )
    with pytest.warns(UserWarning, match="rotary embedding changes"):
        kwargs = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        kwargs |= dict(attention_mask=mask, eos_token_id=first)
        actual = specdec_ext.generate(model, ids, **kwargs)
    assert torch.equal(actual, expected)


def test_length_of_embeddings_counts_for_the_change():
    model = rotated("dynamic")
    ids, _ = prompts((12,))
    embedded = model.get_input_embeddings()(ids).detach()
    kwargs = dict(inputs_embeds=embedded, max_new_tokens=12, do_sample=False)
    with pytest.warns(UserWarning, match="rotary embedding changes"):
        actual = specdec_ext.generate(model, **kwargs)
    assert torch.equal(actual, model.generate(**kwargs))


def test_rows_of_a_plainly_decoded_batch_may_end_early():
    model = zoo.build("qwen4_exp_text")
    assert not specdec_ext.supports(model).batch
    ids, mask = prompts((7, 11, 5))
    free = generate(model, ids, attention_mask=mask)
    ends = dict(attention_mask=mask, eos_token_id=[int(free[0, 14]), int(free[2, 18])])
    expected = generate(model, ids, **ends)
    assert (expected[:, 11:] == 0).any(), "no row ended early"
    with pytest.warns(UserWarning, match="without speculation in a batch of 3"):
        actual = generate(model, ids, generated(free, 11), **ends)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_experts_of_limited_capacity_are_decoded_plainly(share):
    sizes = {"ffn_dim": 64, "attention_heads": 4, "sparse_step": 1}
    fields = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in sizes.items()}
    fields |= dict(vocab_size=zoo.VOCAB, d_model=32, encoder_layers=1, decoder_layers=2)
    fields |= dict(num_experts=4, moe_eval_capacity_token_fraction=share, eos_token_id=None)
    config = NllbMoeConfig(**fields)
    torch.manual_seed(0)
    model = NllbMoeForConditionalGeneration(config).eval()
    zoo.spread(model)
    support = specdec_ext.supports(model)
    assert support.chain == (share == 1)
    assert support.chain or "depend on the other tokens of a pass" in support.reasons[-1]
    ids, _ = prompts((9,))
    expected = generate(model, ids)
    drafter = ScriptedDrafter(generated(expected, 1), noisy_chain) if support.chain else None
    kwargs = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)


def test_unknown_states_in_modules_are_not_supported():
    model = copy.deepcopy(zoo.build("llama"))
    model.model.layers[1].recurrent_states = None
    support = specdec_ext.supports(model)
    assert not support.chain and "states outside of the cache" in support.reasons[0]


def test_indexer_of_hidden_states_has_the_text_of_transformers():
    model = zoo.build("dots3_note_text")
    ids, mask = prompts((9, 4))
    expected = generate(model, ids, attention_mask=mask)
    actual = generate(model, ids, generated(expected, 9), random_tree, attention_mask=mask)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("lengths", [(9,), (8, 5, 8)], ids=str)
def test_nemotron_h_has_the_logits_of_single_token_passes(lengths):
    model = zoo.build("nemotron_h")
    ids, mask = prompts(lengths)
    kwargs = dict(attention_mask=mask, return_dict_in_generate=True, output_logits=True)
    plain = generate(model, ids, **kwargs)
    answers = generated(plain.sequences, ids.shape[1])
    ours = generate(model, ids, answers, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences) and ours.speculation_stats.accepted_tokens
    torch.testing.assert_close(ours.logits, plain.logits, atol=1e-3, rtol=1e-3)


def test_ids_may_have_32_bits():
    model = zoo.build("llama")
    ids, _ = prompts((9,))
    expected = generate(model, ids.int())
    actual = generate(model, ids.int(), generated(expected, 9))
    assert torch.equal(actual, expected) and actual.dtype == expected.dtype


def test_refused_call_leaves_the_cache_unchanged():
    model = zoo.build("llama")
    ids, _ = prompts((9,))
    cache = DynamicCache(config=model.config)
    generate(model, ids, generated(generate(model, ids), 9), oracle_tree, past_key_values=cache)
    held = cache.get_seq_length()
    with pytest.raises(ValueError, match=f"{CACHE} holds {held} tokens and the prompt 9"):
        specdec_ext.generate(model, ids, past_key_values=cache, max_new_tokens=3)
    assert cache.get_seq_length() == held
