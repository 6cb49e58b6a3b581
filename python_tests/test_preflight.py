"""What a command says before its work: packages that are missing, outputs that can't be written.

Claims: the advice to install an extra can be followed and has one source; ...
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from specdec_ext.preflight import extras
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
