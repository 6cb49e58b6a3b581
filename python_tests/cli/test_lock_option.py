"""``--lock``: generate, serve and inspect refuse any pair but the locked one, and say what differs."""

from __future__ import annotations

import shutil

import pytest
from helpers.command_line import run, words

from specdec_ext import PairLock, assets

TARGET, HEAD = (assets.FOLDER / f"tiny-python-{kind}" for kind in ("target", "head"))
SHORT = ("--prompt", "import os\n", "--max-new-tokens", 4)


@pytest.fixture(scope="module")
def lock(tmp_path_factory):
    """The lock of the bundled pair, with the drafter "auto"."""
    return PairLock.of(assets.load_target(), "auto").save(
        tmp_path_factory.mktemp("lock") / "pair.lock"
    )


@pytest.fixture
def other_head(tmp_path):
    """The bundled head with one other byte in its weights."""
    folder = shutil.copytree(HEAD, tmp_path / "head")
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    return folder


def test_the_locked_pair_generates(lock):
    result = run("generate", *SHORT, "--lock", lock)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drafter", "head"), "the drafter is HeadDrafter, not NgramDrafter + HeadDrafter"),
        (("--speculation", "fixed"), "speculation is fixed, not auto"),
        (("--drafter", "none"), "there is no draft with files, such as tiny-python-head"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_another_pair_is_refused(command, options, message, lock):
    before = ("bundled", "--port", 0) if command == "serve" else SHORT
    result = run(command, *before, *options, "--lock", lock, columns=400)
    assert result.exit_code == 2
    assert "--lock: this is not the locked pair:" in words(result.output)
    assert message in words(result.output)


def test_another_head_is_refused_by_file(lock, other_head):
    result = run("generate", *SHORT, "--drafter", other_head, "--lock", lock, columns=400)
    assert result.exit_code == 2
    assert "draft head: model.safetensors has SHA-256" in words(result.output)


def test_a_file_that_is_no_lock_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "pair.lock").write_text("{}")
    result = run("serve", "no/such-model", "--lock", tmp_path / "pair.lock", columns=400)
    assert result.exit_code == 2 and "pair_lock is None; expected 2" in words(result.output)


def test_inspect_compares_files(lock, other_head):
    same = run("inspect", HEAD, "--target", TARGET, "--lock", lock, columns=400)
    assert same.exit_code == 0, same.output
    assert "as locked: tiny-python-target with NgramDrafter + HeadDrafter" in words(same.output)
    other = run("inspect", other_head, "--lock", lock, columns=400)
    assert other.exit_code == 1
    assert "not the locked pair: draft head: model.safetensors has SHA" in words(other.output)
    wrong = assets.FOLDER / "tiny-python-draft"  # as target, it does not even fit
    both = run("inspect", HEAD, "--target", wrong, "--lock", lock, columns=400)
    assert both.exit_code == 1 and "can't work" in words(both.output)
    assert "not the locked pair: target tiny-python-draft: config.json" in words(both.output)
