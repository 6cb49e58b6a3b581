"""A checkpoint's folder or hub id is a drafter, in Python and on the command line.

Claims: the text is that of plain decoding; names, folders of heads and folders of models are told apart.
"""

from __future__ import annotations

import re

import pytest
import torch
from helpers.checks.lossless import generate, plain_text
from helpers.command_line import run
from helpers.drafters.checkpoint_cases import random_head
from helpers.drafters.medusa_cases import random_heads
from helpers.models.tiny import prompts, tiny_model

import specdec_ext
from specdec_ext import assets, load_draft, save_draft
from specdec_ext.drafters import resolve_drafter
from specdec_ext.drafters.heads.head import HeadDrafter
from specdec_ext.heads.checkpoints import is_draft, save_medusa

TARGET = assets.FOLDER / "tiny-python-target"
LAYERS = {"feature_layers": (1, 2, 3)}


@pytest.fixture
def folder(tmp_path):
    return save_draft(random_head(**LAYERS), tmp_path / "head")


@pytest.mark.parametrize("kind", ["head", "medusa"])
def test_folder_is_a_drafter(kind, folder, tmp_path):
    if kind == "medusa":
        folder = save_medusa(random_heads(), tmp_path / "medusa")
    assert is_draft(folder)
    for drafter in (folder, str(folder), load_draft(folder)):
        output = generate(drafter, "five-ragged", "greedy", speculation="fixed")
        assert torch.equal(output.sequences, plain_text("five-ragged", "greedy"))
        assert output.speculation_stats.draft_tokens > 0


def test_medusa_heads_take_no_overrides_of_heads(tmp_path):
    save_medusa(random_heads(), tmp_path)
    with pytest.raises(ValueError, match="holds Medusa heads, which have no norm_output"):
        load_draft(tmp_path, norm_output=True)


def test_head_name_and_folder_resolve_to_a_head_drafter(folder, monkeypatch):
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
        ("eagle9", ValueError, r"is not known; expected one of \['auto', .* the folder or hub id of a draft"),
        ("ngrm", ValueError, "drafter='ngrm' is not known; did you mean 'ngram'?"),
        ("./no/such", OSError, "'./no/such' is neither a file nor a folder, nor a hub id"),
        (7, TypeError, "drafter is a int; expected one of"),
    ],
)  # fmt: skip
def test_other_drafter_arguments_are_refused(drafter, error, message):
    with pytest.raises(error, match=message):
        resolve_drafter(drafter, tiny_model("llama"))


def test_pair_that_cannot_work_is_refused_before_the_first_token(tmp_path):
    folder = save_draft(random_head(feature_layers=(1, 2, 9)), tmp_path)
    ids, _ = prompts((5,))
    message = r"can't draft for .* \[1, 2, 9\] .* has only layers 0 to 2"
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(tiny_model("llama"), ids, drafter=folder, max_new_tokens=2)


def test_command_line_takes_heads(tmp_path):
    sizes = {"hidden_size": 256, "target_hidden_size": 256, "vocab_size": 4096}
    options = {**sizes, "draft_vocab_size": 4096, "feature_layers": (2, 3, 4)}
    folder = save_draft(random_head(**options), tmp_path / "head")
    texts = []
    for drafter in ("none", folder, TARGET):  # TARGET, a model, is a draft model
        options = ["--prompt", "def area(", "--max-new-tokens", "8", "--stats"]
        result = run("generate", *options, "--drafter", drafter)
        assert result.exit_code == 0, result.output
        texts.append(result.stdout)
        count = int(re.search(r"of (\d+) draft tokens", result.stderr).group(1))
        assert (count > 0) == (drafter != "none")
    assert len(set(texts)) == 1
