"""``drafter="auto"`` is n-gram alone or combined with the head that the model's config names.

Claims: the text is that of plain decoding; the head is read once per model, and calls share only its weights.
"""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from helpers.drafters.checkpoint_cases import random_head
from helpers.drafters.medusa_cases import random_heads
from helpers.models.tiny import prompts, tiny_model

import specdec_ext
from specdec_ext.drafters import NgramDrafter, resolve, resolve_drafter
from specdec_ext.drafters.combined import CombinedDrafter
from specdec_ext.drafters.heads.head import HeadDrafter
from specdec_ext.heads.checkpoints import save_medusa

HEAD = {"feature_layers": (1, 2, 3)}


@pytest.fixture
def model(tmp_path):
    """A target in a folder that also has a folder with a head."""
    folder = tmp_path / "model"
    target = copy.deepcopy(tiny_model("llama"))
    target.config.specdec_ext_draft = "head"
    target.save_pretrained(folder)
    specdec_ext.save_draft(random_head(**HEAD), folder / "head")
    return type(target).from_pretrained(folder)


def run(model, drafter):
    ids, mask = prompts((5, 8))
    kwargs = dict(attention_mask=mask, do_sample=False, max_new_tokens=12)
    return specdec_ext.generate(model, ids, drafter=drafter, return_dict_in_generate=True, **kwargs)


def test_model_without_a_head_uses_n_grams():
    assert isinstance(resolve_drafter("auto", tiny_model("llama")), NgramDrafter)
    assert run(tiny_model("llama"), "auto").speculation_stats.drafter == "NgramDrafter"


def test_head_that_the_model_names_is_read_once(model, monkeypatch, tmp_path):
    loads = []
    load = resolve.load_draft
    monkeypatch.setattr(resolve, "load_draft", lambda path, **_: loads.append(path) or load(path))
    outputs = [run(model, drafter) for drafter in (None, "auto", "auto")]
    for output in outputs[1:]:
        assert torch.equal(output.sequences, outputs[0].sequences)
        assert output.speculation_stats.drafter == "CombinedDrafter"
        assert output.speculation_stats.draft_tokens > 0
    assert len(loads) == 1
    moved = shutil.copytree(loads[0], tmp_path / "moved")
    model.config.specdec_ext_draft = str(moved)
    run(model, "auto")
    assert len(loads) == 2


def test_calls_share_only_weights(model):
    first, second = (resolve_drafter("auto", model) for _ in range(2))
    assert isinstance(first, CombinedDrafter) and isinstance(first.model_based, HeadDrafter)
    assert first.retrieval is not second.retrieval
    assert first.model_based is not second.model_based
    assert first.model_based._bound is second.model_based._bound


def test_calls_share_medusa_heads_in_the_dtype_of_the_target(model, tmp_path):
    model = model.to(torch.bfloat16)
    save_medusa(random_heads(), tmp_path / "medusa")
    model.config.specdec_ext_draft = str(tmp_path / "medusa")
    first, second = (resolve_drafter("auto", model).model_based for _ in range(2))
    assert first is not second and first._heads is second._heads
    first.feature_layers(model)
    assert first._heads is second._heads


@pytest.mark.parametrize("named", ["", 3, ["head"]])
def test_config_with_an_invalid_name_is_refused(model, named):
    model.config.specdec_ext_draft = named
    with pytest.raises(ValueError, match=r"model\.config\.specdec_ext_draft is .*hub id"):
        run(model, "auto")
    assert run(model, "ngram").speculation_stats.draft_tokens >= 0


def test_head_of_another_model_is_refused(model, tmp_path):
    specdec_ext.save_draft(random_head(**HEAD, target_hidden_size=64), tmp_path / "other")
    model.config.specdec_ext_draft = str(tmp_path / "other")
    with pytest.raises(ValueError, match="64"):
        run(model, "auto")
