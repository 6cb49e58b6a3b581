"""A checkpoint's folder or hub id is a drafter, in Python and on the command line.

Claims: text is what plain decoding emits; names, folders of heads and folders of models are told apart.
"""

from __future__ import annotations

import re

import pytest
import torch
from checkpoint_cases import random_head
from medusa_cases import random_heads
from tiny import prompts, tiny_model
from typer.testing import CliRunner

import specdec_ext
from specdec_ext import assets, load_draft, save_draft
from specdec_ext.cli import app
from specdec_ext.drafters import resolve_drafter
from specdec_ext.drafters.head import HeadDrafter
from specdec_ext.heads.checkpoints import is_draft, save_medusa

TARGET = assets.FOLDER / "tiny-python-target"
LAYERS = {"feature_layers": (1, 2, 3)}


@pytest.fixture
def folder(tmp_path):
    return save_draft(random_head(**LAYERS), tmp_path / "head")


def test_a_folder_is_a_drafter(folder):
    ids, mask = prompts((5, 8))
    law = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    plain = specdec_ext.generate(tiny_model("llama"), ids, drafter=None, **law)
    for drafter in (folder, str(folder), specdec_ext.load_draft(folder)):
        drafted = specdec_ext.generate(
            tiny_model("llama"),
            ids,
            drafter=drafter,
            speculation="fixed",
            return_dict_in_generate=True,
            **law,
        )
        assert torch.equal(drafted.sequences, plain)
        assert drafted.speculation_stats.draft_tokens > 0


def test_a_folder_of_medusa_heads_is_a_drafter(tmp_path):
    save_medusa(random_heads(), tmp_path)
    assert is_draft(tmp_path)
    ids, _ = prompts((5,))
    law = {"max_new_tokens": 12, "do_sample": False}
    plain = specdec_ext.generate(tiny_model("llama"), ids, drafter=None, **law)
    for drafter in (tmp_path, load_draft(tmp_path)):
        drafted = specdec_ext.generate(
            tiny_model("llama"), ids, drafter=drafter, return_dict_in_generate=True, **law
        )
        assert torch.equal(drafted.sequences, plain)
        assert drafted.speculation_stats.draft_tokens > 0
    with pytest.raises(ValueError, match="holds Medusa heads, which have no norm_output"):
        load_draft(tmp_path, norm_output=True)


def test_what_a_head_is_named_by(folder, monkeypatch):
    head = random_head(**LAYERS)
    asked = []
    monkeypatch.setattr(
        "specdec_ext.drafters.resolve.load_draft", lambda name, **_: asked.append(name) or head
    )
    monkeypatch.setattr("specdec_ext.drafters.resolve.is_draft", lambda name: True)
    model = tiny_model("llama")
    for drafter in (head, "org/name", folder, str(folder)):
        found = resolve_drafter(drafter, model)
        assert isinstance(found, HeadDrafter) and found.head is head
    assert asked == ["org/name", str(folder)]  # a folder is read once for a model


@pytest.mark.parametrize(
    "drafter, error, message",
    [
        (
            "eagle9",
            ValueError,
            r"is not known; expected one of \['auto', .* the folder or hub id of a draft",
        ),
        ("ngrm", ValueError, "drafter='ngrm' is not known; did you mean 'ngram'?"),
        ("./no/such", OSError, "'./no/such' is neither a file nor a folder, nor a hub id"),
        (7, TypeError, "drafter is a int; expected one of"),
    ],
)
def test_what_is_no_head(drafter, error, message):
    with pytest.raises(error, match=message):
        resolve_drafter(drafter, tiny_model("llama"))


def test_a_pair_that_cannot_work_is_an_error_before_the_first_token(tmp_path):
    folder = save_draft(random_head(feature_layers=(1, 2, 9)), tmp_path)
    ids, _ = prompts((5,))
    with pytest.raises(
        ValueError, match=r"can't draft for .* \[1, 2, 9\] .* has only layers 0 to 2"
    ):
        specdec_ext.generate(tiny_model("llama"), ids, drafter=folder, max_new_tokens=2)


def test_heads_and_models_are_told_apart(folder):
    assert is_draft(folder)
    assert not is_draft(TARGET)


def test_the_command_line_takes_heads(tmp_path):
    sizes = {"hidden_size": 256, "target_hidden_size": 256, "vocab_size": 4096}
    options = {**sizes, "draft_vocab_size": 4096, "feature_layers": (2, 3, 4)}
    folder = save_draft(random_head(**options), tmp_path / "head")
    texts = []
    for drafter in ("none", folder, TARGET):  # the last: a whole model is a draft model, as before
        arguments = ["generate", "--prompt", "def area(", "--max-new-tokens", "8", "--stats"]
        result = CliRunner().invoke(app, [*arguments, "--drafter", str(drafter)])
        assert result.exit_code == 0, result.output
        texts.append(result.stdout)
        count = int(re.search(r"of (\d+) draft tokens", result.stderr).group(1))
        assert (count > 0) == (drafter != "none")
    assert len(set(texts)) == 1


def test_the_command_line_names_what_is_wrong(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    arguments = ["generate", "-p", "a", "--drafter", str(tmp_path)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "has no weight file" in result.output
