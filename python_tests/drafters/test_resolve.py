"""``drafter=`` names the same things in Python and on the command line, by one resolver.

Claims: there is one default; each name gives its drafter; what a model names, and folders of models, are
loaded once for a target, in its dtype; two tokenizers are compared; and what is not there is an error that
says the way out. No drafter changes the text.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil

import pytest
import torch
from tiny import prompts, tiny_model

import specdec_ext
from specdec_ext import assets
from specdec_ext.cli._common import DRAFTER_HELP
from specdec_ext.cli.bench import bench
from specdec_ext.cli.check import check
from specdec_ext.cli.demo import demo
from specdec_ext.cli.generate import generate
from specdec_ext.drafters import draft_model, resolve, resolve_drafter
from specdec_ext.drafters.combined import CombinedDrafter
from specdec_ext.drafters.head import HeadDrafter
from specdec_ext.drafters.vocabulary import SharedVocabulary

CODE = "def area(width, height):\n    return width"


@pytest.fixture(scope="module")
def target():
    return assets.load_target()


def completed(model, drafter, **kwargs):
    ids = assets.load_tokenizer()(CODE, return_tensors="pt")["input_ids"]
    return specdec_ext.generate(
        model,
        ids,
        drafter=drafter,
        do_sample=False,
        max_new_tokens=16,
        return_dict_in_generate=True,
        **kwargs,
    )


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
    assert set(expected) == set(resolve.NAMES)
    places = {str(draft_folder): "DraftModelDrafter", draft_folder: "DraftModelDrafter"}
    for name, drafter in {**expected, **places}.items():
        out = completed(target, name)
        assert out.speculation_stats.drafter == drafter
        assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("command", [generate, check, bench, demo])
def test_every_command_and_python_have_one_default(command):
    assert inspect.signature(specdec_ext.generate).parameters["drafter"].default == "auto"
    assert inspect.signature(specdec_ext.custom_generate).parameters["drafter"].default == "auto"
    default = inspect.signature(command).parameters["drafter"].default
    assert default == "auto" or default[-1] == "auto"  # the demo compares some and streams the last


@pytest.mark.parametrize("name", resolve.NAMES)
def test_every_name_is_documented_in_python_and_on_the_command_line(name):
    assert f'"{name}"' in specdec_ext.generate.__doc__
    assert name in re.findall(r"\w+", DRAFTER_HELP)


@pytest.mark.parametrize("name", ["head", "draft"])
def test_a_model_that_names_none_says_what_to_do(name):
    with pytest.raises(
        ValueError, match=rf"drafter='{name}' is the draft .* has no such field; set it"
    ):
        resolve_drafter(name, tiny_model("llama"))


def test_what_the_bundled_target_names_is_found_wherever_it_lies(target, tmp_path):
    target.save_pretrained(tmp_path)
    moved = type(target).from_pretrained(tmp_path)
    assert isinstance(resolve_drafter("head", moved), HeadDrafter)
    assert resolve_drafter("draft", moved).model.num_parameters() < target.num_parameters()


def test_a_draft_models_folder_is_read_once_until_it_is_written_again(draft_folder, monkeypatch):
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


def test_the_tokenizers_of_both_folders_are_compared(target, draft_folder, monkeypatch):
    """Of the same model under another vocabulary only tokens that both have are drafted."""
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


def test_the_callers_tokenizer_stands_above_the_targets_folder(draft_folder):
    model = tiny_model("llama")  # made in memory: it has no folder
    assert resolve_drafter(draft_folder, model)._tokenizers == (None, None)
    given = assets.load_tokenizer()
    assert resolve_drafter(draft_folder, assets.load_target(), given)._tokenizers[0] is given


def test_a_head_in_front_of_which_nothing_is_copied(target):
    assert isinstance(resolve_drafter("auto", target), CombinedDrafter)
    assert isinstance(resolve_drafter("head", target), HeadDrafter)


def test_a_hook_serves_many_models(draft_folder):
    hook = specdec_ext.custom_generate("head")
    ids, _ = prompts((5,))
    with pytest.raises(ValueError, match="has no such field"):
        tiny_model("llama").generate(ids, custom_generate=hook, max_new_tokens=2)
    model = assets.load_target()
    ids = assets.load_tokenizer()(CODE, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(
        model.generate(ids, max_new_tokens=8, do_sample=False, custom_generate=hook), expected
    )


# --- places that hold nothing, or something else -----------------------------------------------------


def test_weights_that_are_missing_are_not_made_up(target, draft_folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(draft_folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, draft_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 1 weights .* model\.norm\.weight, which would be initialised"
    ):
        resolve_drafter(draft_folder, target)


def test_a_hub_that_does_not_answer_is_not_waited_for(target, monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("specdec_ext.heads.checkpoints.hub.hub_answers", lambda: False)
    with pytest.raises(
        OSError,
        match=r"'org/head' is neither a file nor a folder, it is not in the hub's cache, and ",
    ):
        resolve_drafter("org/head", target)


def test_an_address_that_takes_no_connection(monkeypatch):
    from specdec_ext.heads.checkpoints import hub

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    assert not hub.hub_answers()
