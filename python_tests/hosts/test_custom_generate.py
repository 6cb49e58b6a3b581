"""A ``custom_generate`` folder makes transformers speculate: ``generate``, streamers, pipelines.

Claim: with the files that ``write_custom_generate`` wrote, texts equal those of plain ``model.generate``
(greedy) or of our plain decoding (sampled with a seed), and drafts are accepted. ``transformers serve`` has a
module of its own.
"""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.models.folders import shared_folder
from transformers import AutoModelForCausalLM, TextStreamer, dynamic_module_utils, pipeline

import specdec_ext
from specdec_ext import assets

TEXTS = ["import os\nimport sys\n\n\ndef main(", "class Stack:\n    def __init__(self"]
GREEDY = dict(max_new_tokens=20, do_sample=False)
SAMPLED = dict(max_new_tokens=20, do_sample=True, seed=3, drafter=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model with its head and our code; transformers copies code to a folder of the test."""
    with pytest.MonkeyPatch.context() as patch:
        modules = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patch.setattr(sys, "path", [*sys.path])  # transformers appends the folder of the code
        yield str(shared_folder(tmp_path_factory.mktemp("pair") / "pair", speculation="fixed"))


@pytest.fixture(scope="module")
def loaded(folder):
    """The model with its ``generate`` replaced by that of the folder."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(params=["named in the call", "folder of the model"])
def speculating(request, folder, loaded):
    """``generate`` by either way to the folder's code."""
    if request.param == "folder of the model":
        return loaded.generate
    model, ours = assets.load_target(), dict(custom_generate=folder, trust_remote_code=True)
    return lambda *args, **kwargs: model.generate(*args, **ours, **kwargs)


def plain(**kwargs):
    return assets.load_target().generate(**kwargs)


def encoded(text):
    return assets.load_tokenizer()(text, return_tensors="pt", padding=True)


def expect_drafts(out, sequences):
    assert torch.equal(out.sequences, sequences)
    assert out.speculation_stats.drafter == "CombinedDrafter"
    assert out.speculation_stats.accepted_tokens > 0


@pytest.mark.parametrize("text", [TEXTS[0], TEXTS], ids=["row", "batch"])
def test_text_is_that_of_generate_and_drafts_are_accepted(speculating, text):
    inputs = encoded(text)
    out = speculating(**inputs, **GREEDY, return_dict_in_generate=True)
    expect_drafts(out, plain(**inputs, **GREEDY))


def test_seed_gives_the_text_of_plain_decoding(speculating):
    inputs = encoded(TEXTS)
    expected = specdec_ext.generate(assets.load_target(), **inputs, **SAMPLED)
    kwargs = {**SAMPLED, "drafter": "auto", "return_dict_in_generate": True}
    expect_drafts(speculating(**inputs, **kwargs), expected)
    assert not torch.equal(speculating(**inputs, **{**kwargs, "seed": 4}).sequences, expected)


def test_streamer_receives_the_text(speculating):
    inputs, pieces = encoded(TEXTS[1]), []
    streamer = TextStreamer(assets.load_tokenizer(), skip_prompt=True)
    streamer.on_finalized_text = lambda text, stream_end=False: pieces.append(text)
    ids = speculating(**inputs, **GREEDY, streamer=streamer)
    new = ids[0, inputs["input_ids"].shape[1] :]
    assert "".join(pieces) == assets.load_tokenizer().decode(new)
    assert len(pieces) > 1


def test_stop_strings_end_the_text(speculating):
    inputs = encoded(TEXTS[1])
    kwargs = dict(GREEDY, stop_strings=["\n"], tokenizer=assets.load_tokenizer())
    expected = plain(**inputs, **kwargs)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + GREEDY["max_new_tokens"]
    assert torch.equal(speculating(**inputs, **kwargs), expected)


def test_positional_arguments_and_an_assistant_as_in_transformers(loaded):
    inputs = encoded(TEXTS[0])
    expected = plain(**inputs, **GREEDY)
    assert torch.equal(loaded.generate(inputs["input_ids"], **GREEDY), expected)
    kwargs = dict(GREEDY, assistant_model=assets.load_draft(), return_dict_in_generate=True)
    out = loaded.generate(**inputs, **kwargs)
    assert out.speculation_stats.drafter == "DraftModelDrafter"
    assert torch.equal(out.sequences, expected)


def test_callers_own_hook_is_used(loaded):
    hook = specdec_ext.custom_generate(None)
    inputs = encoded(TEXTS[0])
    out = loaded.generate(**inputs, **GREEDY, custom_generate=hook, return_dict_in_generate=True)
    assert out.speculation_stats.drafter == "none"


def test_what_only_transformers_can_do_names_the_way_out(loaded):
    with pytest.raises(ValueError, match=r"num_beams.*load it without trust_remote_code"):
        loaded.generate(**encoded(TEXTS[0]), num_beams=2, max_new_tokens=4)


def test_pipeline_streams_and_stops(folder):
    """``pipeline(folder, trust_remote_code=True)``: the text of the same pipeline without our code."""
    found = {}
    for trusted in (False, True):
        pipe = pipeline(
            "text-generation", model=folder, trust_remote_code=trusted, dtype=torch.float32
        )
        ours = getattr(pipe.model.generate, "keywords", {})
        assert (
            "model" in ours
        ) is trusted  # transformers replaced generate by a partial of our function
        pieces = []
        streamer = TextStreamer(pipe.tokenizer, skip_prompt=True)
        streamer.on_finalized_text = lambda text, stream_end=False, to=pieces: to.append(text)
        text = pipe(TEXTS[1], streamer=streamer, stop_sequence="\n", **GREEDY)
        chat = pipe([{"role": "user", "content": "def add(a, b):"}], **GREEDY)
        found[trusted] = text, "".join(pieces), chat
    assert found[True] == found[False]
    assert found[True][1]


# --- writing ----------------------------------------------------------------------------------------


def test_files_are_small_and_need_this_package(tmp_path):
    requirements, code = specdec_ext.write_custom_generate(tmp_path / "new", "ngram", seed=3)
    assert requirements.read_text() == f"specdec_ext>={specdec_ext.__version__}\n"
    assert code == tmp_path / "new" / "custom_generate" / "generate.py"
    assert code.read_text().endswith("generate = generate_function(drafter='ngram', seed=3)\n")
    assert len(code.read_text().splitlines()) <= 15


def test_existing_files_are_kept_unless_asked(tmp_path):
    _, code = specdec_ext.write_custom_generate(tmp_path)
    code.write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"requirements\.txt and .*generate\.py exist already"
    ):
        specdec_ext.write_custom_generate(tmp_path)
    assert code.read_text() == "mine"
    specdec_ext.write_custom_generate(tmp_path, overwrite=True)
    assert "generate_function(drafter='auto')" in code.read_text()


def test_local_drafters_are_found_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "head").mkdir()
    monkeypatch.chdir(tmp_path)
    _, code = specdec_ext.write_custom_generate("model", "head/")
    assert f"drafter={str(tmp_path / 'head')!r}" in code.read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(drafter="ngrams"), "'ngrams' is not known; did you mean 'ngram'"),
        (dict(drafter="./missing"), "'./missing' is neither a file nor a folder"),
        (dict(drafter=specdec_ext.NgramDrafter()), "drafter is a NgramDrafter, which can't be"),
        (dict(speculation="off"), "speculation='off'"),
        (dict(speculation=specdec_ext.SpeculationConfig()), "speculation is a SpeculationConfig"),
        (dict(verification="other"), "verification='other' is not known"),
        (dict(temprature=0.5), "temprature is no argument .* did you mean 'temperature'"),
        (dict(num_beams=2), "num_beams=2 can't be combined"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_write_nothing(tmp_path, arguments, message):
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        specdec_ext.write_custom_generate(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()
