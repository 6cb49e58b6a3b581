"""``drafter=`` has the same values in Python and on the command line.

Claims: there is one default; each name gives its drafter; drafters that a model names, and folders of models,
are loaded once for a target, in its dtype; tokenizers are compared; a missing drafter is an error with a way
out. No drafter changes the text.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil

import pytest
import torch
from helpers.models.tiny import prompts, tiny_model

import specdec_ext
from specdec_ext import assets
from specdec_ext.cli.bench import bench
from specdec_ext.cli.check import check
from specdec_ext.cli.demo import demo
from specdec_ext.cli.generate import generate
from specdec_ext.cli.shared.common import DRAFTER_HELP
from specdec_ext.drafters import draft_model, resolve, resolve_drafter
from specdec_ext.drafters.heads.head import HeadDrafter
from specdec_ext.drafters.vocabulary import SharedVocabulary

CODE = "def area(width, height):\n    return width"


@pytest.fixture(scope="module")
def target():
    return assets.load_target()


def completed(model, drafter, **kwargs):
    ids = assets.load_tokenizer()(CODE, return_tensors="pt")["input_ids"]
    kwargs |= dict(do_sample=False, max_new_tokens=16, return_dict_in_generate=True)
    return specdec_ext.generate(model, ids, drafter=drafter, **kwargs)


@pytest.fixture
def draft_folder(tmp_path):
    """The bundled draft model with its tokenizer, in a folder of its own."""
    return shutil.copytree(assets.FOLDER / "tiny-python-draft", tmp_path / "draft")


def test_every_name_drafts_and_no_name_changes_the_text(target, draft_folder):
    plain = completed(target, None)
    expected = {
        "none": "none",
        "auto": "CombinedDrafter",
        "ngram": "NgramDrafter",
        "suffix": "SuffixDrafter",
        "lookahead": "LookaheadDrafter",
        "head": "HeadDrafter",
        "draft": "DraftModelDrafter",
    }
    assert {*expected, "mtp"} == set(resolve.NAMES)  # "mtp": heads/test_mtp.py
    places = {str(draft_folder): "DraftModelDrafter", draft_folder: "DraftModelDrafter"}
    for name, drafter in {**expected, **places}.items():
        out = completed(target, name)
        assert out.speculation_stats.drafter == drafter
        assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("command", [generate, check, bench, demo])
def test_default_is_the_same_in_python_and_every_command(command):
    assert inspect.signature(specdec_ext.generate).parameters["drafter"].default == "auto"
    assert inspect.signature(specdec_ext.custom_generate).parameters["drafter"].default == "auto"
    default = inspect.signature(command).parameters["drafter"].default
    assert default == "auto" or default[-1] == "auto"  # the demo has several drafters


@pytest.mark.parametrize("name", resolve.NAMES)
def test_every_name_is_documented_in_python_and_on_the_command_line(name):
    assert f'"{name}"' in specdec_ext.generate.__doc__
    assert name in re.findall(r"\w+", DRAFTER_HELP)


@pytest.mark.parametrize("name", ["head", "draft"])
def test_name_of_a_drafter_that_the_model_lacks_is_refused(name):
    message = rf"drafter='{name}' is the draft .* has no such field; set it"
    with pytest.raises(ValueError, match=message):
        resolve_drafter(name, tiny_model("llama"))


def test_drafters_of_a_copied_bundled_target_are_found(target, tmp_path):
    target.save_pretrained(tmp_path)
    moved = type(target).from_pretrained(tmp_path)
    assert isinstance(resolve_drafter("head", moved), HeadDrafter)
    assert resolve_drafter("draft", moved).model.num_parameters() < target.num_parameters()


def test_folder_of_a_draft_model_is_read_again_after_a_change(draft_folder, monkeypatch):
    loads, load = [], resolve.load_language_model
    monkeypatch.setattr(
        resolve, "load_language_model", lambda *given: loads.append(given) or load(*given)
    )
    model = assets.load_target(torch.bfloat16)
    first, second = (resolve_drafter(draft_folder, model) for _ in range(2))
    assert first is not second and first.model is second.model
    assert first.model.dtype == torch.bfloat16 and not first.model.training
    os.utime(draft_folder / "model.safetensors", ns=(1, 1))
    assert resolve_drafter(draft_folder, model).model is not first.model
    assert len(loads) == 2


def test_a_pard_model_is_refused_by_name(draft_folder):
    config = json.loads((draft_folder / "config.json").read_text("utf-8"))
    (draft_folder / "config.json").write_text(json.dumps({**config, "pard_token": 7}), "utf-8")
    with pytest.raises(ValueError, match=r"is a PARD draft model .*pass DraftModelDrafter"):
        resolve_drafter(draft_folder, assets.load_target(torch.bfloat16))


def test_tokenizers_of_both_folders_are_compared(target, draft_folder, monkeypatch):
    """The second draft model has two tokens in another order."""
    found, match = [], draft_model.match_vocabularies

    def noticed(*given):
        found.append(match(*given))
        return found[-1]

    monkeypatch.setattr(draft_model, "match_vocabularies", noticed)
    plain = completed(target, draft_folder)
    content = json.loads((draft_folder / "tokenizer.json").read_text("utf-8"))
    ids = content["model"]["vocab"]
    ids["def"], ids["Ġdef"] = ids["Ġdef"], ids["def"]
    (draft_folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    assert torch.equal(completed(target, draft_folder).sequences, plain.sequences)
    assert [isinstance(each, SharedVocabulary) for each in found] == [False, True]


def test_callers_tokenizer_replaces_that_of_the_targets_folder(draft_folder):
    model = tiny_model("llama")  # has no folder
    assert resolve_drafter(draft_folder, model)._tokenizers == (None, None)
    given = assets.load_tokenizer()
    assert resolve_drafter(draft_folder, assets.load_target(), given)._tokenizers[0] is given


def test_hook_may_be_used_with_many_models(draft_folder):
    hook = specdec_ext.custom_generate("head")
    ids, _ = prompts((5,))
    with pytest.raises(ValueError, match="has no such field"):
        tiny_model("llama").generate(ids, custom_generate=hook, max_new_tokens=2)
    model = assets.load_target()
    ids = assets.load_tokenizer()(CODE, return_tensors="pt")["input_ids"]
    kwargs = dict(max_new_tokens=8, do_sample=False)
    expected = model.generate(ids, **kwargs)
    assert torch.equal(model.generate(ids, custom_generate=hook, **kwargs), expected)


# --- missing drafters --------------------------------------------------------------------------------


def test_missing_weights_are_not_initialised(target, draft_folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(draft_folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, draft_folder / "model.safetensors", metadata={"format": "pt"})
    message = r"lacks 1 weights .* model\.norm\.weight, which would be initialised"
    with pytest.raises(ValueError, match=message):
        resolve_drafter(draft_folder, target)


def test_hub_that_does_not_answer_is_not_waited_for(target, monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("specdec_ext.heads.checkpoints.storage.hub.hub_answers", lambda: False)
    message = "'org/head' is neither a file nor a folder, it is not in the hub's cache, and "
    with pytest.raises(OSError, match=message):
        resolve_drafter("org/head", target)
