"""What differs between versions of transformers: each difference, made on the installed one.

``make test-transformers`` runs the other suites on older versions themselves.
"""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from tiny import make_drafter, prompts, tiny_model
from transformers import DynamicCache

import specdec_ext
from specdec_ext import supports
from specdec_ext.models import compat, support
from specdec_ext.models.cache.layers import RollbackLayer


@pytest.mark.parametrize(
    "crops_to_length, argument, left",
    [
        (False, -2, 3),
        (False, -7, 0),
        (False, 0, 5),
        (True, -2, 3),
        (True, 0, 0),
        (True, 2, 2),
        (True, 7, 5),
    ],
)
def test_crop_means_what_it_means_in_transformers(monkeypatch, crops_to_length, argument, left):
    monkeypatch.setattr(compat, "_CROPS_TO_LENGTH", crops_to_length)
    assert compat.cropped_length(5, argument) == left


def test_crop_to_a_length_is_refused_where_it_is_gone(monkeypatch):
    monkeypatch.setattr(compat, "_CROPS_TO_LENGTH", False)
    with pytest.raises(ValueError, match="negative number of tokens to remove, got 2"):
        compat.cropped_length(5, 2)


def test_what_is_missing_is_of_no_class():
    missing = compat._layer_class("NoSuchLayer")
    unusable = compat._layer_class("DynamicLayer", usable=False)
    assert not isinstance(RollbackLayer(), (missing, unusable))
    assert isinstance(RollbackLayer(), compat._layer_class("DynamicLayer"))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
def test_a_mask_of_ones_changes_nothing(monkeypatch, name):
    model = tiny_model(name)
    ids, mask = prompts((7, 4))
    law = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids, **law)
    monkeypatch.setattr(compat, "NEEDS_MASK", True)
    for rows in (slice(2), slice(1)):
        drafter = make_drafter("oracle_tree", model, expected[rows, 7:].tolist())
        law["attention_mask"] = mask[rows]
        text = specdec_ext.generate(model, ids[rows], drafter=drafter, **law)
        assert torch.equal(text, expected[rows])


def test_states_that_a_pass_of_several_tokens_forgets(monkeypatch):
    model = zoo.build("minimax")
    assert supports(model).chain == compat.STATES_CONTINUE
    monkeypatch.setattr(support, "STATES_CONTINUE", False)
    assert supports(model).rollback == "none"
    assert "its recurrent layers reset their states" in supports(model).reasons[-1]


def test_masks_that_are_not_causal(monkeypatch):
    """Such a model is decoded one token at a time, whatever is drafted."""
    model = tiny_model("llama")
    ids, _ = prompts((7,))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    monkeypatch.setattr(support, "_CAUSAL_MASKS", {"no_such_function"})
    assert supports(model).reasons == (
        "its attention masks are not made through transformers' mask interface",
    )
    monkeypatch.setattr(support, "_BIDIRECTIONAL_MASKS", {"create_causal_mask"})
    verdict = supports(model)
    assert verdict.rollback == "none"
    assert verdict.reasons[-1] == "the tokens of a pass would attend to later tokens"
    with pytest.warns(UserWarning, match="is decoded without speculation"):
        text = specdec_ext.generate(model, ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(text, expected)


def test_decoders_of_the_installed_version():
    """Up to 5.17 RemBERT's masks are not causal, and Git shifts its positions for single tokens."""
    assert supports(zoo.build("rembert")).tree == (not compat.NEEDS_MASK)
    assert supports(zoo.build("git")).chain == (not compat.NEEDS_MASK)


def test_positions_that_the_cache_keeps_are_rolled_back():
    """As transformers 5.17 keeps those of Qwen4: each pass appends its own."""
    model = copy.deepcopy(tiny_model("llama"))
    plain = model.forward

    def forward(*args, past_key_values=None, position_ids=None, **kwargs):
        before = getattr(past_key_values, "position_ids", position_ids[:, :0])
        past_key_values.position_ids = torch.cat([before, position_ids], dim=-1)
        seen.append(past_key_values.position_ids)
        return plain(*args, past_key_values=past_key_values, position_ids=position_ids, **kwargs)

    seen: list[torch.Tensor] = []
    model.forward = forward
    ids, _ = prompts((7,))
    expected = tiny_model("llama").generate(ids, max_new_tokens=12, do_sample=False)
    drafter = make_drafter("noisy_chain", model, expected[:, 7:].tolist())
    cache = DynamicCache(config=model.config)
    specdec_ext.generate(
        model, ids, drafter=drafter, past_key_values=cache, max_new_tokens=12, do_sample=False
    )
    assert len(seen) < 12
    for positions in [*seen, cache.position_ids]:
        assert positions[0].tolist() == list(range(positions.shape[1]))
    assert cache.position_ids.shape[1] == cache.get_seq_length() == expected.shape[1] - 1


def test_a_layer_that_nothing_is_written_to_is_empty():
    layer = RollbackLayer()
    layer.length = 5
    assert layer.get_seq_length() == 0
