"""``drafter="auto"`` is n-gram alone, or in front of the head that the model's config names.

Claims: the text is plain decoding's; the head is read once per model, and calls share its weights alone.
"""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from checkpoint_cases import random_head
from medusa_cases import random_heads
from tiny import prompts, tiny_model

import specdec_ext
from specdec_ext.drafters import NgramDrafter, resolve, resolve_drafter
from specdec_ext.drafters.combined import CombinedDrafter
from specdec_ext.drafters.head import HeadDrafter
from specdec_ext.heads.checkpoints import save_medusa

HEAD = {"feature_layers": (1, 2, 3)}


@pytest.fixture
def model(tmp_path):
    """A target in a folder, with a head in a folder inside."""
    folder = tmp_path / "model"
    target = copy.deepcopy(tiny_model("llama"))
    target.config.specdec_ext_draft = "head"
    target.save_pretrained(folder)
    specdec_ext.save_draft(random_head(**HEAD), folder / "head")
    return type(target).from_pretrained(folder)


def run(model, drafter):
    ids, mask = prompts((5, 8))
    return specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        drafter=drafter,
        do_sample=False,
        max_new_tokens=12,
        return_dict_in_generate=True,
    )


def test_a_model_without_a_head():
    assert isinstance(resolve_drafter("auto", tiny_model("llama")), NgramDrafter)
    assert run(tiny_model("llama"), "auto").speculation_stats.drafter == "NgramDrafter"


def test_a_model_that_names_its_head(model, monkeypatch, tmp_path):
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


def test_calls_share_weights_alone(model):
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
def test_a_config_that_names_no_head(model, named):
    model.config.specdec_ext_draft = named
    with pytest.raises(ValueError, match=r"model\.config\.specdec_ext_draft is .*hub id"):
        run(model, "auto")
    assert run(model, "ngram").speculation_stats.draft_tokens >= 0


def test_a_head_of_another_model(model, tmp_path):
    specdec_ext.save_draft(random_head(**HEAD, target_hidden_size=64), tmp_path / "other")
    model.config.specdec_ext_draft = str(tmp_path / "other")
    with pytest.raises(ValueError, match="64"):
        run(model, "auto")
