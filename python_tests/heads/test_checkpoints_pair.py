"""Which states of the target a head reads, and whether head and target belong together.

Claims: the ids of the layers that a head reads are understood as each project means them, in published
configs; a pair that can't work is an error that names every reason; a doubtful pair gives a warning, a good
one gives none.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
from helpers.drafters.checkpoint_cases import random_head, read_folder, write_folder
from helpers.drafters.medusa_cases import random_heads
from helpers.models.tiny import SIZES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from specdec_ext import assets
from specdec_ext.heads.checkpoints import (
    check_pair,
    load_draft,
    save_draft,
    save_medusa,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from specdec_ext.heads.checkpoints.config.feature_layers import recorded_layers
from specdec_ext.heads.checkpoints.config.fields import Fields
from specdec_ext.heads.record import HeadRecord

# --- layers that a head reads ------------------------------------------------------------------------

IDS = "eagle_aux_hidden_state_layer_ids"
# name: config, expected hidden states, target layers
PUBLISHED = {
    "Kimi K2.5": ({"eagle_config": {IDS: [1, 29, 57]}}, (2, 30, 58), 61),
    "gpt-oss v2": ({"eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33), 36),
    "gpt-oss v3": ({"eagle_config": {IDS: [24, 30, 36]}}, (24, 30, 36), 36),
    "SpecForge, Kimi K2.5": ({"eagle_config": {IDS: [2, 30, 58]}}, (2, 30, 58), 61),
    "SpecForge, from 4": ({"eagle_config": {IDS: [4, 20, 40]}}, (5, 21, 41), 48),
    "SpecForge, Gemma 3 27B": ({"eagle_config": {IDS: [1, 29, 61]}}, (2, 30, 62), 62),
    "SpecForge default, 32 layers": ({"eagle_config": {IDS: [1, 15, 28]}}, (2, 16, 29), 32),
    "speculators, 32 layers": ({"speculators_model_type": "eagle3", IDS: [2, 16, 29]}, (2, 16, 29), 32),
    "speculators, any order": ({"speculators_model_type": "eagle3", IDS: [29, 2, 16]}, (2, 16, 29), 32),
    "speculators that begins with 1": ({"speculators_model_type": "eagle3", IDS: [1, 9]}, (1, 9), 32),
    "vLLM, at the top": ({IDS: [1, 15, 28]}, (1, 15, 28), 32),
    "vLLM V2, nested": ({"eagle_config": {"layer_ids": [2, 16, 29]}}, (2, 16, 29), 32),
    "dflash": ({"dflash_config": {"target_layer_ids": [1, 9, 17]}}, (2, 10, 18), 36),
    "both spellings": ({IDS: [2, 16, 29], "eagle_config": {IDS: [1, 15, 28]}}, (2, 16, 29), 32),
    "both spellings, from 3": ({IDS: [3, 5], "eagle_config": {IDS: [2, 4]}}, (3, 5), 32),
    "ours": ({"specdec_ext": {"feature_layers": [5, 21]}, IDS: [5, 21]}, (5, 21), 32),
    "nested without ids": ({"eagle_config": {"use_aux_hidden_state": True}}, None, 32),
    "absent": ({}, None, 32),
    "empty lists": ({IDS: [], "eagle_config": {IDS: []}}, None, 32),
    "an empty list beside another": ({IDS: [], "eagle_config": {IDS: [1, 15, 28]}}, (2, 16, 29), 32),
}  # fmt: skip
GUESSED = {"SpecForge, from 4"}


@pytest.mark.parametrize("case", PUBLISHED)
def test_layer_ids_of_published_configs_are_understood(case):
    config, expected, num_layers = PUBLISHED[case]
    found = recorded_layers(Fields(config, "config.json"))
    assert found.layers == expected
    assert "layers" in found.origin
    assert found.layers is None or max(found.layers) <= num_layers
    assert found.guessed == (case in GUESSED)


@pytest.mark.parametrize("num_layers", [8, 32, 36, 61])
def test_specforges_default_layers_are_those_of_eagle3(num_layers):
    outputs = [1, num_layers // 2 - 1, num_layers - 4]
    found = recorded_layers(Fields({"eagle_config": {IDS: outputs}}, "config.json"))
    assert found.layers == random_head().config.resolved_feature_layers(num_layers)


def test_head_without_aux_hidden_states_reads_the_last_hidden_state(tmp_path):
    """As nvidia's short-context gpt-oss head with use_aux_hidden_state: false, which wins over layer ids."""
    head = random_head(has_fc=False, num_features=1, feature_layers=(-1,))
    read = load_draft(save_draft(head, tmp_path))
    assert read.config.feature_layers == (-1,)
    assert "last hidden state" in read.record.layers_from


# --- pairs -------------------------------------------------------------------------------------------


@functools.cache
def target(**overrides):
    """A target without weights, because the check reads only its config."""
    sizes = {
        **SIZES,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model("llama", **{**sizes, **overrides})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


GOOD = {
    "eagle1": ("eagle1", {}),
    "eagle3": ("eagle3", {}),
    "own embedding": ("eagle3", {"own_embedding": True}),
    "draft vocabulary": ("eagle3", {"draft_vocab_size": 40}),
    "target's lm_head": ("eagle3", {"own_lm_head": False}),
    "no fc": ("eagle3", {"has_fc": False, "num_features": 1, "feature_layers": (-1,)}),
    "first and last layer": ("eagle3", {"feature_layers": (0, 7, 8)}),
    "last hidden state beside others": ("eagle3", {"feature_layers": (1, 2, -1)}),
}


@pytest.mark.parametrize("case", GOOD)
def test_good_pairs_raise_no_doubt(case):
    kind, options = GOOD[case]
    assert check_pair(random_head(kind, **options), target()) == []
    assert check_pair(random_head(kind, **options), target(), assets.load_tokenizer()) == []


def test_target_with_weights_raises_no_doubt():
    assert check_pair(random_head(feature_layers=(0, 1, 2)), tiny_model("llama")) == []


BAD = {
    "narrow features": ({"target_hidden_size": 24, "own_embedding": True}, {},
        "width 24, but the target's have 32"),
    "shared embedding of another width": ({"hidden_size": 16, "head_dim": 4}, {},
        "uses the target's embedding, but its width is 16 and the target's 32"),
    "target with more tokens": ({"own_embedding": True}, {"vocab_size": 98},
        "embedding has 97 tokens, but the target has 98"),
    "target with fewer tokens": ({}, {"vocab_size": 96}, "token ids up to 96, but the target has only 96"),
    "lm_head of another size": ({"own_lm_head": False}, {"vocab_size": 98},
        r"has shape \[98, 32\]; expected \[97, 32\]"),
    "layer outside": ({"feature_layers": (2, 4, 9)}, {},
        r"\[2, 4, 9\] \(HeadConfig\), but the target has only layers 0 to 7; pass feature_layers"),
    "shallow target": ({}, {"num_hidden_layers": 3}, r"are \[2, 1, 0\] for a target of 3 layers"),
    "very shallow target": ({}, {"num_hidden_layers": 1}, "the target has only layers 0 to 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_pairs_that_cannot_work_are_refused(case):
    options, overrides, message = BAD[case]
    message = f"a head made in memory can't draft for LlamaFor.*{message}"
    with pytest.raises(ValueError, match=message):
        check_pair(random_head(**options), target(**overrides))


def test_error_names_every_reason():
    with pytest.raises(ValueError, match=r"width 24.*layers 0 to 7"):
        check_pair(random_head(target_hidden_size=24, feature_layers=(2, 4, 9)), target())


def test_tied_head_needs_a_tied_target():
    head = random_head(own_lm_head=False)
    tied = type(head)(head.config, head.tensors, record=HeadRecord(tied=True))
    assert check_pair(tied, target(tie_word_embeddings=True)) == []
    with pytest.raises(ValueError, match="its lm_head is the target's embedding"):
        check_pair(tied, target())


@pytest.mark.parametrize(
    "recorded, name, same",
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "/models/llama-3.1-8b-instruct/", True),
        ("/data/Qwen3-8B", "hub/models--Qwen--Qwen3-8B/snapshots/0123abcd", True),
        ("org/base", "", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "me/Llama-3.1-8B-Instruct-finetuned", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", False),
    ],
)
def test_other_target_name_raises_a_doubt(recorded, name, same):
    head = random_head()
    head = type(head)(head.config, head.tensors, record=HeadRecord(target_name=recorded))
    model = target(bos_token_id=1)  # its own copy: its name is changed
    model.config._name_or_path = name
    doubts = check_pair(head, model)
    assert len(doubts) == (not same)
    for doubt in doubts:
        assert f"was trained for {recorded}, but the target is {name}; " in doubt


def without_own_section(config, tensors):
    del config["specdec_ext"]


def only_nested_layers(config, tensors):
    del config["specdec_ext"], config["eagle_aux_hidden_state_layer_ids"]


AMBIGUOUS = {
    "norm_output of SpecForge": ({"norm_output": True}, without_own_section, ["norm_output"]),
    "nested ids": ({"feature_layers": (3, 4, 6)}, only_nested_layers, ["feature_layers"]),
    "both": ({"feature_layers": (3, 4, 6), "norm_output": True}, only_nested_layers,
        ["feature_layers", "norm_output"]),
    "what is saved here": ({"feature_layers": (3, 4, 6), "norm_output": True}, None, []),
}  # fmt: skip


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_ambiguous_option_raises_a_doubt_until_it_is_given(case, tmp_path):
    """Arguments of load_draft give it, or a calibration."""
    options, edit, expected = AMBIGUOUS[case]
    folder = save_draft(random_head(**options), tmp_path)
    config, tensors = read_folder(folder)
    if edit is not None:
        edit(config, tensors)
        write_folder(folder, config, tensors)
    head = load_draft(folder)
    assert list(head.record.ambiguous) == expected
    doubts = check_pair(head, target())
    for name, doubt in zip(expected, doubts, strict=True):
        value = getattr(head.config, name)
        assert f"{name} is read as {value}, but its config is ambiguous" in doubt
        assert "--calibrate, and pass it as load_draft" in doubt
    said = {name: getattr(head.config, name) for name in expected}
    assert check_pair(load_draft(folder, **said), target()) == []
    saved = load_draft(save_draft(head, tmp_path / "again"))
    assert check_pair(saved, target()) == [] and saved.config == head.config


def test_specdec_ext_section_must_agree_with_the_config(tmp_path):
    folder = save_draft(random_head(norm_output=True), tmp_path)
    config, tensors = read_folder(folder)
    config["norm_output"] = False
    write_folder(folder, config, tensors)
    with pytest.raises(ValueError, match="norm_output is False, but True in its section specdec_"):
        load_draft(folder)


# --- weights -----------------------------------------------------------------------------------------


def named(model, name, revision=None):
    model = copy.deepcopy(model)
    model.config._name_or_path, model.config._commit_hash = name, revision
    return model


def made_for(model, folder, kind):
    """A head, or Medusa heads, saved for this target and read again."""
    if kind == "medusa":
        return load_draft(save_medusa(random_heads(), folder, layout="vllm", target=model))
    return load_draft(
        save_draft(random_head(feature_layers=(1, 2, 3)), folder, layout=kind, target=model)
    )


@pytest.mark.parametrize("kind", ["eagle", "speculators", "medusa"])
def test_other_weights_of_the_target_raise_a_doubt(kind, tmp_path):
    model = named(tiny_model("llama"), "org/name", "0123abcd")
    head = made_for(model, tmp_path, kind)
    assert head.record.target_name == "org/name" and head.record.target_revision == "0123abcd"
    assert head.record.target_fingerprint == weights_fingerprint(model)
    assert check_pair(head, model) == []
    assert check_pair(head, named(model, "another/copy")) == [], "the same weights"
    tuned = named(model, "org/name", "0123abcd")
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    (doubt,) = check_pair(head, tuned)
    assert "was trained for other weights of org/name (fingerprint" in doubt
    (doubt,) = check_pair(head, named(tuned, "org/tuned"))
    assert "was trained for org/name, but the target is org/tuned" in doubt


def test_other_revision_raises_a_doubt_without_weights(tmp_path):
    head = made_for(named(tiny_model("llama"), "org/name", "0123abcd"), tmp_path, "eagle")
    (doubt,) = check_pair(head, named(target(bos_token_id=3), "org/name", "4567"))
    assert "was trained for revision 0123abcd of org/name, but the target is revision 4567" in doubt
    assert check_pair(head, named(target(bos_token_id=3), "org/name", "0123abcd")) == []


def test_fingerprint_depends_on_values_alone():
    """Neither dtype nor names nor wrappers change it; without plain numbers it is None."""
    model = named(tiny_model("llama"), "")
    rounded = copy.deepcopy(model).bfloat16()
    assert weights_fingerprint(rounded) == weights_fingerprint(model)
    assert weights_fingerprint(rounded.float()) == weights_fingerprint(model)
    assert weights_fingerprint(torch.compile(model)) == weights_fingerprint(model)
    assert weights_fingerprint(tiny_model("qwen3")) != weights_fingerprint(model)
    assert weights_fingerprint(copy.deepcopy(model).half()) is None
    assert weights_fingerprint(target()) is None


def test_local_target_is_recorded_by_its_folder_name(tmp_path):
    model = named(tiny_model("llama"), str(tmp_path))
    head = made_for(model, tmp_path / "head", "eagle")
    assert head.record.target_name == tmp_path.name


def test_medusa_heads_are_checked_against_their_target():
    heads = random_heads()
    assert check_pair(heads, target()) == []
    message = "width 32, but the target's have 64.*up to 96, but the target has only 96"
    with pytest.raises(ValueError, match=message):
        check_pair(heads, target(hidden_size=64, vocab_size=96))
    heads = dataclasses.replace(heads, record=HeadRecord(target_name="org/other"))
    model = target(bos_token_id=2)
    model.config._name_or_path = "org/this"
    assert "was trained for org/other, but the target is org/this" in check_pair(heads, model)[0]


def test_tokens_that_the_head_does_not_know_raise_a_doubt():
    """A target with added tokens works with a head that uses the target's embedding."""
    doubts = check_pair(random_head(), target(vocab_size=100))
    assert len(doubts) == 1 and "a vocabulary of 97 tokens, but the target has 100" in doubts[0]


def test_other_tokenizer_raises_a_doubt(tmp_path):
    tokenizer = assets.load_tokenizer()
    head = load_draft(save_draft(random_head(), tmp_path, tokenizer=tokenizer))
    assert check_pair(head, target(), tokenizer) == []
    other = assets.load_tokenizer()
    other.add_tokens(["<a token that was not there>"])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer)
    assert "trained with another tokenizer" in check_pair(head, target(), other)[0]
    assert check_pair(head, target()) == [], "without a tokenizer there is nothing to compare"
