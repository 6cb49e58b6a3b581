"""A prompt of embeddings (``inputs_embeds``), with or without ids beside it.

Claim: in greedy decoding the ids, the recorded outputs (tolerance 1e-4) and the cache are those of
``model.generate`` with the same arguments, for every kind of drafter, alone and in a ragged batch. For
embeddings of known ids sampled text is that of these ids.
"""

import functools

import pytest
import torch
from helpers.drafters.head_cases import head_of
from helpers.drafters.medusa_cases import random_heads
from helpers.models import zoo
from helpers.models.tiny import (
    ScriptedDrafter,
    generated,
    noisy_chain,
    prompts,
    random_tree,
    tiny_model,
)
from transformers import DynamicCache

import specdec_ext

NEW = 12
LENGTHS = {"one": (7,), "ragged": (9, 4, 7)}
DRAFTERS = {
    "none": lambda answers: None,
    "noisy-chain": lambda answers: ScriptedDrafter(answers, noisy_chain),
    "random-tree": lambda answers: ScriptedDrafter(answers, random_tree),
    "ngram": lambda answers: specdec_ext.NgramDrafter(min_ngram=1),
    "suffix": lambda answers: "suffix",
    "lookahead": lambda answers: "lookahead",
    "draft-model": lambda answers: specdec_ext.DraftModelDrafter(tiny_model("llama")),
    "head": lambda answers: specdec_ext.HeadDrafter(head_of("eagle3", hidden_size=32)),
    "medusa": lambda answers: specdec_ext.MedusaDrafter(random_heads()),
}
EOS = [61, 28]  # ends two of the rows early


def prompt(batch: str, ids: str, name: str = "llama") -> dict:
    """Embeddings of random ids, with no ids, the same ids or others."""
    tokens, mask = prompts(LENGTHS[batch])
    embeddings = tiny_model(name).get_input_embeddings()(tokens).detach()
    kwargs = dict(inputs_embeds=embeddings, attention_mask=mask)
    if ids == "same":
        kwargs["input_ids"] = tokens
    if ids == "others":
        kwargs["input_ids"] = prompts((3,) * len(tokens), seed=8)[0]
    return kwargs


def columns(kwargs: dict) -> int:
    return kwargs["input_ids"].shape[1] if "input_ids" in kwargs else 0


@pytest.mark.parametrize("batch", ["ragged", pytest.param("one", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ids", ["none", pytest.param("same", marks=pytest.mark.slow), "others"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_that_of_hf(drafter, ids, batch):
    model, given = tiny_model("llama"), prompt(batch, ids)
    kwargs = dict(**given, max_new_tokens=NEW, do_sample=False, eos_token_id=EOS)
    expected = model.generate(**kwargs)
    answers = generated(expected, columns(given))
    kwargs |= dict(drafter=DRAFTERS[drafter](answers), speculation="fixed")
    assert torch.equal(specdec_ext.generate(model, **kwargs), expected)


@pytest.mark.parametrize("ids", ["none", "others"])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_outputs_and_cache_are_those_of_hf(name, ids):
    model, given = tiny_model(name, "eager"), prompt("one", ids, name)
    kwargs = dict(**given, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    for recorded in ("scores", "logits", "hidden_states", "attentions"):
        kwargs[f"output_{recorded}"] = True
    expected = model.generate(**kwargs)
    drafter = ScriptedDrafter(generated(expected.sequences, columns(given)), noisy_chain)
    actual = specdec_ext.generate(model, drafter=drafter, speculation="fixed", **kwargs)
    assert torch.equal(actual.sequences, expected.sequences)
    for recorded in ("scores", "logits", "hidden_states", "attentions"):
        torch.testing.assert_close(actual[recorded], expected[recorded], rtol=1e-4, atol=1e-4)
    assert actual.past_key_values.get_seq_length() == 7 + NEW - 1


@pytest.mark.parametrize("batch", LENGTHS)
def test_second_turn_is_that_of_hf(batch):
    model, given = tiny_model("llama"), prompt(batch, "none")
    embed = model.get_input_embeddings()
    texts = []
    for generate in (model.generate, functools.partial(specdec_ext.generate, model)):
        cache = DynamicCache()
        kwargs = dict(max_new_tokens=NEW, do_sample=False, past_key_values=cache)
        first = generate(**given, **kwargs)
        question = torch.cat([first, prompts((4,) * len(first), seed=3)[0]], dim=1)
        whole = torch.cat([given["inputs_embeds"], embed(question).detach()], dim=1)
        mask = torch.nn.functional.pad(given["attention_mask"], (0, question.shape[1]), value=1)
        texts.append((first, generate(inputs_embeds=whole, attention_mask=mask, **kwargs)))
    assert torch.equal(texts[0][0], texts[1][0])
    assert torch.equal(texts[0][1], texts[1][1])


def test_sampled_text_is_that_of_the_ids():
    model, given = tiny_model("llama"), prompt("ragged", "same")
    kwargs = dict(max_new_tokens=NEW, do_sample=True, top_k=20, seed=4, num_return_sequences=2)
    mask = given["attention_mask"]
    ids = given.pop("input_ids")
    expected = specdec_ext.generate(model, ids, attention_mask=mask, drafter=None, **kwargs)
    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), noisy_chain)
    actual = specdec_ext.generate(model, drafter=drafter, speculation="fixed", **given, **kwargs)
    assert torch.equal(actual, expected[:, ids.shape[1] :])


def test_max_length_counts_tokens_as_in_hf():
    model = tiny_model("llama")
    for ids in ("none", "others"):
        kwargs = dict(prompt("one", ids), max_length=20, do_sample=False)
        assert torch.equal(specdec_ext.generate(model, **kwargs), model.generate(**kwargs))


@pytest.mark.parametrize("ids", ["none", "others"])
@pytest.mark.parametrize("kind", ["bloom", "mamba2", "rwkv"])
def test_other_kinds_of_targets_have_the_text_of_hf(kind, ids):
    """A bias by distance, recurrent states in the cache, and states that transformers passes on."""
    model = zoo.build(kind)
    tokens, mask = prompts((7,))
    embeddings = model.get_input_embeddings()(tokens).detach()
    kwargs = dict(
        inputs_embeds=embeddings, attention_mask=mask, do_sample=False, max_new_tokens=NEW
    )
    if ids == "others":
        kwargs["input_ids"] = tokens[:, :3]
    expected = model.generate(**kwargs)
    drafter = ScriptedDrafter(generated(expected, columns(kwargs)), noisy_chain)
    actual = specdec_ext.generate(model, drafter=drafter, speculation="fixed", **kwargs)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(inputs_embeds=torch.zeros(1, 0, 32)), r"the prompt has shape \(1, 0, 32\)"),
        (
            dict(inputs_embeds=torch.zeros(1, 4, 32), attention_mask=torch.tensor([[0, 1, 1]])),
            r"attention_mask has shape \(1, 3\) and inputs_embeds \(1, 4\); pass the whole text",
        ),
    ],
)
def test_wrong_shapes_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(tiny_model("llama"), max_new_tokens=3, **kwargs)


def test_embeddings_may_be_read_in_chunks():
    model, given = tiny_model("llama"), prompt("ragged", "none")
    kwargs = dict(given, max_new_tokens=NEW, do_sample=False)
    chunked = specdec_ext.generate(model, prefill_chunk_size=2, **kwargs)
    assert torch.equal(chunked, model.generate(**kwargs))
