"""What a command says before its work: packages that are missing, outputs that can't be written.

Claims: the advice to install an extra can be followed and has one source; a file or folder that can't be
written is named, with the option that named it, and nothing is made on the way.
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
    """The package is on no index: an extra is installed from a checkout. One place says how."""
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
        r"pip install '\.\[train\]'\. Do without$"
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
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root everything can be written
    with pytest.raises(PermissionError, match=rf"--out {tmp_path}/x: {tmp_path} can't be written"):
        check(tmp_path / "x", "--out")


def test_files_where_none_can_be(tmp_path):
    with pytest.raises(OSError, match=f"--json {tmp_path} is no regular file"):
        outputs.writable_file(tmp_path, "--json")
    with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path}/a/b; make it"):
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
def test_every_file_is_looked_at_before_a_model_is_read(name, option, tmp_path, monkeypatch):
    """Minutes of measuring, or hours of training, were lost when a file could not be written."""
    (tmp_path / "text.jsonl").write_text('{"text": "a text"}\n')
    arguments = []
    if name == "train":
        arguments = ["bundled", "--data", tmp_path / "text.jsonl", "--out", tmp_path / "head"]
    module = sys.modules[f"specdec_ext.cli.{name}"]
    monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("a model was read"))
    code, said = run(name, *arguments, option, tmp_path / "text.jsonl" / "below")
    assert code == 2 and "text.jsonl" in said, said
    assert not (tmp_path / "head").exists()


def test_packages_and_numbers_are_looked_at_before_a_model_is_read(tmp_path, monkeypatch):
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
