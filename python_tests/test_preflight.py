"""What a command says before its work: packages that are missing, outputs that can't be written.

Claims: the advice to install an extra can be followed and has one source; a file or folder that can't be
written is named, with the option that named it, and nothing is made on the way.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec_ext.cli import app
from specdec_ext.preflight import extras, outputs
from specdec_ext.preflight.extras import require

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    path
    for pattern in (
        "specdec_ext/**/*.py",
        "profiling/**/*.py",
        "training/**/*.py",
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


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_bench_looks_at_its_outputs_before_it_measures(option, tmp_path, monkeypatch):
    """Minutes of measurements were lost when the file could not be written."""
    command = sys.modules["specdec_ext.cli.bench"]
    monkeypatch.setattr(command, "load_target", lambda *_: pytest.fail("the model was read"))
    result = CliRunner().invoke(app, ["bench", option, str(tmp_path / "missing" / "file")])
    assert result.exit_code == 2 and "there is no folder" in " ".join(result.output.split())
    if option == "--plot":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        result = CliRunner().invoke(app, ["bench", option, str(tmp_path / "file.png")])
        assert result.exit_code == 2 and "--plot needs matplotlib" in result.output
