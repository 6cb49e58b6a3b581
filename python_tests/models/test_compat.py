"""Differences between versions of transformers, simulated with the installed one.

``make test-transformers`` runs the other tests with older versions.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import zoo
from helpers.models.tiny import make_drafter, prompts, tiny_model
from transformers import DynamicCache

import specdec_ext
from specdec_ext import supports
from specdec_ext.models import compat, support
from specdec_ext.models.cache.layers import RollbackLayer


@pytest.mark.parametrize(
    "crops_to_length, argument, left",
    [(False, -2, 3), (False, -7, 0), (False, 0, 5), (True, -2, 3), (True, 0, 0), (True, 2, 2), (True, 7, 5)],
)  # fmt: skip
def test_crop_is_that_of_transformers(monkeypatch, crops_to_length, argument, left):
    monkeypatch.setattr(compat, "_CROPS_TO_LENGTH", crops_to_length)
    assert compat.cropped_length(5, argument) == left


def test_crop_to_a_length_is_refused_in_newer_versions(monkeypatch):
    monkeypatch.setattr(compat, "_CROPS_TO_LENGTH", False)
    with pytest.raises(ValueError, match="negative number of tokens to remove, got 2"):
        compat.cropped_length(5, 2)


def test_no_layer_is_of_a_missing_class():
    missing = compat._layer_class("NoSuchLayer")
    unusable = compat._layer_class("DynamicLayer", usable=False)
    assert not isinstance(RollbackLayer(), (missing, unusable))
    assert isinstance(RollbackLayer(), compat._layer_class("DynamicLayer"))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
def test_mask_of_ones_does_not_change_the_text(monkeypatch, name):
    model = tiny_model(name)
    ids, mask = prompts((7, 4))
    kwargs = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids, **kwargs)
    monkeypatch.setattr(compat, "NEEDS_MASK", True)
    for rows in (slice(2), slice(1)):
        drafter = make_drafter("oracle_tree", model, expected[rows, 7:].tolist())
        kwargs["attention_mask"] = mask[rows]
        text = specdec_ext.generate(model, ids[rows], drafter=drafter, **kwargs)
        assert torch.equal(text, expected[rows])


def test_layers_that_reset_their_states_are_not_supported(monkeypatch):
    model = zoo.build("minimax")
    assert supports(model).chain == compat.STATES_CONTINUE
    monkeypatch.setattr(support, "STATES_CONTINUE", False)
    assert supports(model).rollback == "none"
    assert "its recurrent layers reset their states" in supports(model).reasons[-1]


def test_models_without_causal_masks_are_decoded_plainly(monkeypatch):
    model = copy.deepcopy(tiny_model("llama"))  # of which nothing was found out yet
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


def test_support_depends_on_the_version():
    """Up to 5.17 RemBERT's masks are not causal, and Git shifts its positions in passes of one token."""
    assert supports(zoo.build("rembert")).tree == (not compat.NEEDS_MASK)
    assert supports(zoo.build("git")).chain == (not compat.NEEDS_MASK)


def test_positions_in_the_cache_are_rolled_back():
    """In transformers 5.17 each pass of Qwen4 appends its positions to the cache."""
    model = copy.deepcopy(tiny_model("llama"))
    plain = model.forward

    def forward(*args, past_key_values=None, position_ids=None, **kwargs):
        before = getattr(past_key_values, "position_ids", position_ids[:, :0])
        past_key_values.position_ids = torch.cat([before, position_ids], dim=-1)
        seen.append(past_key_values.position_ids)
        kwargs[compat.CACHE] = past_key_values
        return plain(*args, position_ids=position_ids, **kwargs)

    seen: list[torch.Tensor] = []
    model.forward = forward
    ids, _ = prompts((7,))
    expected = tiny_model("llama").generate(ids, max_new_tokens=12, do_sample=False)
    drafter = make_drafter("noisy_chain", model, expected[:, 7:].tolist())
    cache = DynamicCache(config=model.config)
    kwargs = dict(past_key_values=cache, max_new_tokens=12, do_sample=False)
    specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
    assert len(seen) < 12
    for positions in [*seen, cache.position_ids]:
        assert positions[0].tolist() == list(range(positions.shape[1]))
    assert cache.position_ids.shape[1] == cache.get_seq_length() == expected.shape[1] - 1


def test_model_that_keeps_the_old_name_of_its_cache_has_trees():
    """Since 5.24 ``model.generate`` fails for such a model of a hub, or forgets the text before."""

    class Old(type(tiny_model("llama"))):
        def forward(self, input_ids=None, past_key_values=None, position_ids=None, **kwargs):
            kwargs[compat.CACHE] = past_key_values
            return super().forward(input_ids, position_ids=position_ids, **kwargs)

    model = Old(tiny_model("llama").config).eval()
    model.load_state_dict(tiny_model("llama").state_dict())
    assert supports(model).rollback == "compact"
    ids, _ = prompts((7,))
    kwargs = dict(max_new_tokens=12, do_sample=False)
    expected = tiny_model("llama").generate(ids, **kwargs)
    drafter = make_drafter("oracle_tree", model, expected[:, 7:].tolist())
    output = specdec_ext.generate(
        model, ids, drafter=drafter, return_dict_in_generate=True, **kwargs
    )
    assert torch.equal(output.sequences, expected)
    assert output.speculation_stats.accepted_tokens


def test_layer_without_keys_is_empty():
    layer = RollbackLayer()
    layer.length = 5
    assert layer.get_seq_length() == 0
