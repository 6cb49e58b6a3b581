"""Checks before a command begins its work: missing packages and outputs that can't be written.

Claims: the advice to install an extra works and stands in one place; the message about a file or folder that
can't be written names it and its option, and the check creates nothing.
"""

from __future__ import annotations

import os
import re
import sys
from typing import get_type_hints

import pytest
import typer
from places import ROOT
from typer.testing import CliRunner

from specdec_ext.cli import app
from specdec_ext.preflight import extras, outputs
from specdec_ext.preflight.extras import require

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


def test_the_advice_can_be_followed():
    """The package is in no index, so an extra is installed from a checkout; one module gives the advice."""
    assert len(TEXTS) > 100
    for path in TEXTS:
        text = path.read_text("utf-8")
        assert "install specdec_ext[" not in text and "install specdec-ext[" not in text, path
        if path.suffix == ".py" and path.name != "extras.py":
            assert "pip install '.[" not in text, f"{path}: specdec_ext.preflight.extras says this"


def test_every_optional_package_is_in_the_extra_that_is_named():
    project = (ROOT / "pyproject.toml").read_text()
    for package, extra in extras._EXTRAS.items():
        assert re.search(rf'^{extra} = \[.*"{package}"', project, re.MULTILINE)


def test_a_package_that_is_missing(monkeypatch):
    assert require("matplotlib.figure", "a plot") is sys.modules["matplotlib.figure"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    expected = (
        "a plot needs matplotlib, which is not installed; in a checkout of specdec_ext: "
        r"pip install '\.\[plot\]'\. Do without$"
    )
    with pytest.raises(ImportError, match=expected):
        require("matplotlib.figure", "a plot", "Do without")


# --- outputs -----------------------------------------------------------------------------------------


def test_outputs_that_can_be_written(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    for name in ("old.json", "new.json"):
        outputs.writable_file(tmp_path / name, "--json")
    for name in (".", "new", "new/below"):
        outputs.writable_folder(tmp_path / name, "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


@pytest.mark.parametrize("check", [outputs.writable_file, outputs.writable_folder])
def test_outputs_that_can_not_be_written(check, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"--out {tmp_path}/file/below: "):
        check(tmp_path / "file" / "below", "--out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    message = rf"--out {tmp_path}/x: no permission to write to {tmp_path}; choose"
    with pytest.raises(PermissionError, match=message):
        check(tmp_path / "x", "--out")


def test_a_folder_as_output_file_and_a_missing_folder_are_refused(tmp_path):
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


def run(name, *arguments):
    result = CliRunner().invoke(app, [name, *map(str, arguments)], env={"COLUMNS": "300"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_commands_have_files():
    assert {"bench --json", "bench --plot", "train --out"} <= {each.id for each in FILES}


@pytest.mark.parametrize("name, option", FILES)
def test_every_file_is_checked_before_a_model_is_loaded(name, option, tmp_path, monkeypatch):
    """Otherwise minutes of measuring or hours of training are lost when a file can't be written."""
    (tmp_path / "text.jsonl").write_text('{"text": "a text"}\n')
    arguments = []
    if name == "train":
        arguments = ["bundled", "--data", tmp_path / "text.jsonl", "--out", tmp_path / "head"]
    module = sys.modules[f"specdec_ext.cli.{name}"]
    monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("a model was read"))
    code, said = run(name, *arguments, option, tmp_path / "text.jsonl" / "below")
    assert code == 2 and "text.jsonl" in said, said
    assert not (tmp_path / "head").exists()


def test_packages_and_numbers_are_checked_before_a_model_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "text.jsonl").write_text('{"text": "a text"}\n')
    for name in ("bench", "train"):
        module = sys.modules[f"specdec_ext.cli.{name}"]
        monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("a model was read"))
    train = ["train", "bundled", "--data", tmp_path / "text.jsonl", "--out", tmp_path / "head"]
    code, said = run(*train, "--learning-rate", 0)
    assert code == 2 and "learning_rate is 0" in said
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, said = run("bench", "--plot", tmp_path / "plot.png")
    assert code == 2 and "--plot needs matplotlib" in said
    monkeypatch.setitem(sys.modules, "accelerate", None)
    code, said = run(*train)
    assert code == 2 and "training needs accelerate" in said
