"""Models that count cache slots where they could count tokens, and calls whose verdict depends on length.

Claim: relative distances (Inkling) are those of each row; queries scaled by slot are served where they are
columns; rotary embeddings that change with the longest row are left to transformers unless no row
can be on the other side; a model that can't be speculated on in a batch reads it as transformers does.
"""

import contextlib
import copy

import pytest
import torch
import zoo
from tiny import ScriptedDrafter, generated, noisy_chain, oracle_tree, prompts, random_tree
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
)

import specdec_ext

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
def test_distances_of_ragged_rows(name, lengths, shape):
    model = zoo.build(name)
    ids, mask = prompts(lengths)
    kwargs = dict(attention_mask=mask, return_dict_in_generate=True, output_logits=True)
    plain = generate(model, ids, **kwargs)
    answers = generated(plain.sequences, ids.shape[1])
    ours = generate(model, ids, answers, shape, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation_stats.drafts
    torch.testing.assert_close(ours.logits, plain.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(6,), (6, 4)], ids=str)
@pytest.mark.parametrize("name", ["llama4_text", "inkling_text+scaled"])
def test_queries_scaled_by_slot(name, lengths):
    """Llama 4 is told the columns; of Inkling behind that length only chains of one row are right."""
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
    config = AutoConfig.for_model(
        "llama",
        vocab_size=zoo.VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **rope},
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    zoo.spread(model)
    return model


def test_the_longest_row_ends_before_the_others_are_behind_the_change():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = rotated("longrope", original_max_position_embeddings=16, **factors)
    ids, mask = prompts((20, 6))
    free = generate(model, ids, attention_mask=mask)
    first = int(free[0, 20])
    expected = generate(model, ids, attention_mask=mask, eos_token_id=first)
    assert (expected[0, 21:] == 0).all() and expected.shape[1] > 24, "the long row goes on"
    with pytest.warns(UserWarning, match="rotary embedding changes"):
        actual = specdec_ext.generate(
            model,
            ids,
            attention_mask=mask,
            eos_token_id=first,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    assert torch.equal(actual, expected)


def test_embeddings_count_for_the_change():
    model = rotated("dynamic")
    ids, _ = prompts((12,))
    embedded = model.get_input_embeddings()(ids).detach()
    expected = model.generate(inputs_embeds=embedded, max_new_tokens=12, do_sample=False)
    with pytest.warns(UserWarning, match="rotary embedding changes"):
        actual = specdec_ext.generate(
            model, inputs_embeds=embedded, max_new_tokens=12, do_sample=False
        )
    assert torch.equal(actual, expected)


def test_rows_that_end_where_a_batch_is_not_speculated_on():
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
def test_experts_of_limited_capacity(share):
    config = NllbMoeConfig(
        vocab_size=zoo.VOCAB,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_experts=4,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        moe_eval_capacity_token_fraction=share,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = NllbMoeForConditionalGeneration(config).eval()
    zoo.spread(model)
    support = specdec_ext.supports(model)
    assert support.chain == (share == 1)
    assert support.chain or "depend on the other tokens of a pass" in support.reasons[-1]
    ids, _ = prompts((9,))
    expected = generate(model, ids)
    drafter = ScriptedDrafter(generated(expected, 1), noisy_chain) if support.chain else None
    actual = specdec_ext.generate(
        model, ids, drafter=drafter, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    assert torch.equal(actual, expected)


def test_states_in_modules_that_nobody_knows():
    model = copy.deepcopy(zoo.build("llama"))
    model.model.layers[1].recurrent_states = None
    support = specdec_ext.supports(model)
    assert not support.chain and "states outside of the cache" in support.reasons[0]


def test_an_indexer_that_reads_hidden_states_alone():
    model = zoo.build("dots3_note_text")
    ids, mask = prompts((9, 4))
    expected = generate(model, ids, attention_mask=mask)
    assert torch.equal(
        generate(model, ids, generated(expected, 9), random_tree, attention_mask=mask), expected
    )


@pytest.mark.parametrize("lengths", [(9,), (8, 5, 8)], ids=str)
def test_steps_that_only_passes_over_several_tokens_clamp(lengths):
    model = zoo.build("nemotron_h")
    ids, mask = prompts(lengths)
    kwargs = dict(attention_mask=mask, return_dict_in_generate=True, output_logits=True)
    plain = generate(model, ids, **kwargs)
    answers = generated(plain.sequences, ids.shape[1])
    ours = generate(model, ids, answers, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences) and ours.speculation_stats.accepted_tokens
    torch.testing.assert_close(ours.logits, plain.logits, atol=1e-3, rtol=1e-3)


def test_ids_of_32_bits():
    model = zoo.build("llama")
    ids, _ = prompts((9,))
    expected = generate(model, ids.int())
    actual = generate(model, ids.int(), generated(expected, 9))
    assert torch.equal(actual, expected) and actual.dtype == expected.dtype


def test_a_refused_call_leaves_the_cache():
    model = zoo.build("llama")
    ids, _ = prompts((9,))
    cache = DynamicCache(config=model.config)
    generate(model, ids, generated(generate(model, ids), 9), oracle_tree, past_key_values=cache)
    held = cache.get_seq_length()
    with pytest.raises(ValueError, match=f"past_key_values holds {held} tokens and the prompt 9"):
        specdec_ext.generate(model, ids, past_key_values=cache, max_new_tokens=3)
    assert cache.get_seq_length() == held
