"""A user error on the command line gives one sentence and exit code 2, without a traceback.

Claim: the sentence names the argument, the given value and a solution, and appears immediately.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import pytest
import torch
from helpers.command_line import run, words

from specdec_ext import assets

TARGET, HEAD = (str(assets.FOLDER / f"tiny-python-{kind}") for kind in ("target", "head"))
SHORT = ("-p", "x", "--max-new-tokens", "1")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def sentence(*arguments: object, **options) -> str:
    """The message of a call that must be refused."""
    result = run(*arguments, columns=300, **options)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit) and "Traceback" not in result.output
    return words(result.output)


@pytest.mark.parametrize(
    "arguments, message",
    [
        pytest.param(("--device", "cuda"), "--device: cuda: torch", marks=NO_GPU),
        (("--device", "mps"), "--device: mps: the ops of this package run on cpu and cuda"),
        (("--device", "gpu0"), "--device: 'gpu0' is not a device; expected auto, cpu, cuda or cuda:N"),
        (("--dtype", "int8"), "'int8' is not one of 'auto', 'float32'"),
        (("--drafter", "ngrm"), "--drafter: drafter='ngrm' is not known; did you mean 'ngram'?"),
        (("--drafter", "./nonexistent"), "--drafter: './nonexistent' is neither a file nor a folder"),
        ((HEAD,), f"MODEL: {HEAD} is a draft head, not a language model"),
        (("./nonexistent",), "MODEL: './nonexistent' is neither a file nor a folder, nor a hub id"),
        (("--seed", "1", "--top-p", "0.5"), "--top-p, --seed needs --sample"),
        (("-p", ""), "the prompt is empty"),
        (("--max-new-tokens", "0"), "--max-new-tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_generate_names_the_wrong_argument(arguments, message):
    assert message in sentence("generate", *SHORT, *arguments)


@pytest.mark.parametrize("command", ["generate", "check", "bench", "inspect"])
def test_every_command_refuses_an_unknown_device(command, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    given = {
        "generate": SHORT,
        "inspect": (HEAD, "--target", TARGET, "--calibrate", str(tmp_path / "a.txt")),
    }
    assert "--device: 'gpu0'" in sentence(command, *given.get(command, ()), "--device", "gpu0")


def test_folders_without_tokenizer_or_known_model_type_are_refused(tmp_path):
    model = shutil.copytree(TARGET, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert "has no tokenizer that transformers can load" in sentence("generate", str(model), *SHORT)
    (model / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    found = sentence("generate", str(model), *SHORT)
    assert "can't be loaded as a causal language model" in found


@pytest.mark.parametrize("command", ["bench", "check"])
def test_unreadable_prompt_files_are_refused(command, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    message = sentence(command, "--prompts", str(tmp_path / "bad.json"))
    assert "bad.json is not valid JSON" in message


def test_prompts_that_are_no_text_are_refused(tmp_path):
    assert "the prompt is not text" in sentence("generate", "-p", "\udce9", "--max-new-tokens", "1")
    assert "utf-8" in sentence("generate", "--max-new-tokens", "1", stdin=b"caf\xe9")


def test_unknown_keyword_gets_a_suggestion():
    message = sentence("keywords", "foobar")
    assert "'foobar': no keyword of generate contains that in its name; leave it out" in message
    assert "did you mean 'temperature'?" in sentence("keywords", "temprature")


@pytest.mark.parametrize(
    "command", [("generate", "org/no-such-model", "-p", "x"), ("inspect", "org/no-head")]
)
def test_unknown_name_is_refused_immediately_without_a_network(command, monkeypatch):
    """Without the check, huggingface_hub would retry for most of a minute."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    began = time.perf_counter()
    message = sentence(*command)
    assert (
        "is neither a file nor a folder, it is not in the hub's cache, and http://127.0.0.1:1"
        in message
    )
    assert time.perf_counter() - began < 10


# --- commands without a model start fast ----------------------------------------------------------

LIGHT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy", "huggingface_hub"):
            raise ImportError(f"{name} takes seconds to import")

sys.meta_path.insert(0, Refuse())
from specdec_ext.cli import app
app(prog_name="specdec")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("version",),
        ("keywords", "beams"),
        ("keywords", "--markdown"),
        ("--help",),
        ("bench", "--help"),
    ],
    ids=" ".join,
)
def test_commands_without_a_model_import_neither_torch_nor_transformers(arguments):
    done = subprocess.run([sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
