"""Checks before a command begins: missing packages and outputs that can't be written.

Claims: the advice to install an extra works and is written in one module; the message about an output that
can't be written names the path and the option, and the check creates nothing.
"""

from __future__ import annotations

import os
import re
import sys
from typing import get_type_hints

import pytest
import typer
from helpers.command_line import run, words
from helpers.places import ROOT

from specdec_ext.cli import app
from specdec_ext.planning import memory
from specdec_ext.preflight import extras, outputs
from specdec_ext.preflight.extras import require
from specdec_ext.rollout import own_server
from specdec_ext.watch import watcher

TEXTS = [
    path
    for pattern in (
        "specdec_ext/**/*.py",
        "profiling/**/*.py",
        "tools/**/*.py",
        "docs/**/*.md",
        "*.md",
    )
    for path in ROOT.glob(pattern)
]


# --- optional packages -------------------------------------------------------------------------------


def test_one_module_says_how_to_install_an_extra():
    """The package is in no index, so an extra is installed from a checkout."""
    assert len(TEXTS) > 100
    for path in TEXTS:
        text = path.read_text("utf-8")
        assert "install specdec_ext[" not in text and "install specdec-ext[" not in text, path
        if path.suffix == ".py" and path.name != "extras.py":
            assert "pip install '.[" not in text, f"{path}: use specdec_ext.preflight.extras"


def test_every_optional_package_is_in_its_extra():
    project = (ROOT / "pyproject.toml").read_text()
    for package, extra in extras._EXTRAS.items():
        assert re.search(rf'^{extra} = \[.*"{package}["\[]', project, re.MULTILINE)


def test_a_missing_package_is_an_error_with_the_install_command(monkeypatch):
    assert require("matplotlib.figure", "a plot") is sys.modules["matplotlib.figure"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    expected = (
        "a plot needs matplotlib, which is not installed; in a checkout of specdec_ext: "
        r"pip install '\.\[plot\]'\. Do without$"
    )
    with pytest.raises(ImportError, match=expected):
        require("matplotlib.figure", "a plot", "Do without")


# --- outputs -----------------------------------------------------------------------------------------


def test_writable_outputs_pass_and_are_not_created(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    for name in ("old.json", "new.json"):
        outputs.writable_file(tmp_path / name, "--json")
    for name in (".", "new", "new/below"):
        outputs.writable_folder(tmp_path / name, "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


@pytest.mark.parametrize("check", [outputs.writable_file, outputs.writable_folder])
def test_outputs_that_can_not_be_written_are_refused(check, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"--out {tmp_path}/file/below: "):
        check(tmp_path / "file" / "below", "--out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    message = rf"--out {tmp_path}/x: no permission to write to {tmp_path}; choose"
    with pytest.raises(PermissionError, match=message):
        check(tmp_path / "x", "--out")


def test_folder_as_output_file_and_missing_folder_are_refused(tmp_path):
    with pytest.raises(OSError, match=f"--json {tmp_path} is not a regular file"):
        outputs.writable_file(tmp_path, "--json")
    message = f"the folder {tmp_path}/a/b does not exist; create it"
    with pytest.raises(FileNotFoundError, match=message):
        outputs.writable_file(tmp_path / "a" / "b" / "c.json", "--json")


# --- commands ----------------------------------------------------------------------------------------

COMMANDS = {each.callback.__name__: each.callback for each in app.registered_commands}
FILES = [
    pytest.param(name, option.opts[0], id=f"{name} {option.opts[0]}")
    for name, command in typer.main.get_command(app).commands.items()
    for option in command.params
    if "pathlib.Path" in str(get_type_hints(COMMANDS[name]).get(option.name))
]


def refused(*arguments) -> str:
    """The message of a command that must be refused."""
    result = run(*arguments, columns=300)
    assert result.exit_code == 2, result.output
    return words(result.output)


def test_options_that_are_files_are_found():
    assert {"bench --out", "bench --plot", "train --out"} <= {each.id for each in FILES}


@pytest.mark.parametrize("name, option", FILES)
def test_every_output_is_checked_before_a_model_is_loaded(name, option, tmp_path, monkeypatch):
    """Otherwise minutes of measuring or hours of training would be lost."""
    (tmp_path / "text.jsonl").write_text('{"text": "a text"}\n')
    arguments = []
    if name == "train":
        arguments = ["bundled", "--data", tmp_path / "text.jsonl", "--out", tmp_path / "head"]
    module, reads = sys.modules[f"specdec_ext.cli.{name}"], "load_target"
    if name == "plan":  # reads configs alone
        arguments, module, reads = ["bundled"], memory, "plan"
    if name == "rollout":  # starts a server that reads the model
        module, reads = own_server, "own_server"
    if name == "watch":  # asks a server
        arguments, module, reads = ["http://127.0.0.1:9"], watcher, "Watcher"
    monkeypatch.setattr(module, reads, lambda *_, **__: pytest.fail("a model was read"))
    below = tmp_path / "text.jsonl" / "below"
    if name == "batch":
        files = {"requests": tmp_path / "text.jsonl", "answers": tmp_path / "out.jsonl"}
        arguments = [*(files | {option: below} if option in files else files).values(), "bundled"]
    if option.startswith("-"):
        arguments += [option, below]
    assert "text.jsonl" in refused(name, *arguments)
    assert not (tmp_path / "head").exists()


def test_packages_and_numbers_are_checked_before_a_model_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "text.jsonl").write_text('{"text": "a text"}\n')
    for name in ("bench", "train"):
        module = sys.modules[f"specdec_ext.cli.{name}"]
        monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("a model was read"))
    train = ["train", "bundled", "--data", tmp_path / "text.jsonl", "--out", tmp_path / "head"]
    assert "learning_rate is 0" in refused(*train, "--learning-rate", 0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs matplotlib" in refused("bench", "--plot", tmp_path / "plot.png")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert "training needs accelerate" in refused(*train)
