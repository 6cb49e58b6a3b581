"""What a user installs, and the commands around it.

The wheel is built without CUDA from a copy of exactly the files that git would carry, so a file that is
ignored by mistake is missed here; it is then installed into an empty environment and used outside the
repository. Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def repository_files() -> list[Path]:
    """Files git tracks or would add, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: there is no list of the repository's files")
    files = (Path(name) for name in listed.stdout.split("\0") if name)
    return sorted(path for path in files if (ROOT / path).is_file())


def copy_repository(target: Path) -> None:
    for path in repository_files():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path)


def check_call(*command: str | Path, **kwargs) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- the wheel --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy_repository(folder / "source")
    check_call(
        sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index",
        "--wheel-dir", folder / "dist", folder / "source",
        env={**os.environ, "SPECDEC_CUDA": "0"},
    )  # fmt: skip
    (built,) = (folder / "dist").iterdir()
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for path in repository_files():
        if path.parts[0] == "specdec_ext":
            assert path.as_posix() in names
    assert "specdec_ext/_ops.abi3.so" in names
    assert any(re.fullmatch(r"specdec_ext/_host\..*(so|pyd)", name) for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"specdec_ext"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


USE = """
import torch
import specdec_ext
from specdec_ext import assets, ops

shape = ops.tree_mask(torch.tensor([[-1, 0, 0, 1]]), torch.tensor([7]))
assert shape.positions.tolist() == [[7, 8, 8, 9]]
target, tokenizer = assets.load_target(), assets.load_tokenizer()
ids = tokenizer(assets.held_out_prompts()[0]["prompt"], return_tensors="pt")["input_ids"]
law = dict(max_new_tokens=8, do_sample=False)
expected = target.generate(ids, **law)
assert specdec_ext.generate(target, ids, **law).tolist() == expected.tolist()
print(specdec_ext.__file__)
"""


def test_wheel_works_in_an_empty_environment(wheel, tmp_path):
    """The environment has the wheel alone; torch and the like are borrowed by path from this one."""
    environment = tmp_path / "venv"
    check_call(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    check_call(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel
    )
    site = Path(
        check_call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    # Lines of a .pth file only extend the path: an editable install in the folder stays out of reach.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    used = check_call(python, "-I", "-c", USE, cwd=tmp_path)
    assert Path(used.strip()).is_relative_to(site)
    version = check_call(environment / "bin" / "specdec", "--version", cwd=tmp_path)
    assert "CUDA kernels: not built" in version


# --- the two commands -------------------------------------------------------------------------------


@needs_make
def test_help_lists_every_target():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = phony.split()
    assert {"help", "demo", "test", "lint", "wheel"} <= set(targets)
    listed = check_call("make", "--no-print-directory", cwd=ROOT)
    assert re.findall(r"^  make (\S+) +\S", listed, re.MULTILINE) == targets


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout in which set-up was done an hour ago."""
    for name in ("Makefile", "requirements-dev.txt", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "op.cpp").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    for age, names in (
        (7200, ("requirements-dev.txt", "setup.py", "pyproject.toml", "csrc/op.cpp")),
        (3600, (".venv/.requirements.stamp",)),
        (3500, (".venv/.build-cuda-auto.stamp",)),
    ):
        for name in names:
            (tmp_path / name).touch()
            at = (tmp_path / "Makefile").stat().st_mtime - age
            os.utime(tmp_path / name, (at, at))
    return tmp_path


def planned(checkout: Path, *arguments: str, target: str = "test") -> list[str]:
    """What `make` would do for a target, in order."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("SPECDEC_CUDA", "MAKEFLAGS")
    }
    plan = check_call("make", "-n", target, *arguments, cwd=checkout, env=environment)
    steps = {
        "-m venv": "venv",
        "install --quiet transformers==5.4.0": "transformers",
        "--requirement": "requirements",
        "--editable": "build",
        "-m pytest": "pytest",
    }
    found = [
        step for line in plan.splitlines() for pattern, step in steps.items() if pattern in line
    ]
    return list(dict.fromkeys(found))  # pytest runs twice: emulated kernels need a sanitizer


@needs_make
def test_a_fresh_checkout_is_set_up_first(checkout):
    shutil.rmtree(checkout / ".venv")
    assert planned(checkout) == ["venv", "requirements", "build", "pytest"]


@needs_make
def test_a_second_run_only_tests(checkout):
    assert planned(checkout) == ["pytest"]


@needs_make
@pytest.mark.parametrize(
    "edited, steps",
    [
        ("csrc/op.cpp", ["build", "pytest"]),
        ("setup.py", ["build", "pytest"]),
        ("requirements-dev.txt", ["requirements", "build", "pytest"]),
    ],
)
def test_an_edit_redoes_what_depends_on_it(checkout, edited, steps):
    (checkout / edited).touch()
    assert planned(checkout) == steps


@needs_make
def test_another_choice_of_kernels_rebuilds(checkout):
    assert planned(checkout, "SPECDEC_CUDA=0") == ["build", "pytest"]


@needs_make
def test_another_transformers_is_a_layer_over_the_environment(checkout):
    """Made once for each version, with the interpreter of the environment below it."""
    arguments = ("VERSION=5.4.0",)
    assert planned(checkout, *arguments, target="test-transformers") == [
        "venv", "transformers", "pytest",
    ]  # fmt: skip
    (checkout / ".venv-transformers-5.4.0").mkdir()
    (checkout / ".venv-transformers-5.4.0" / ".stamp").touch()
    assert planned(checkout, *arguments, target="test-transformers") == ["pytest"]


def test_ci_runs_make_test_and_passes_its_failure_on(tmp_path):
    fake = tmp_path / "make"
    fake.write_text('#!/bin/sh\necho "$PWD: make $*"\nexit 7\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / ".ci" / "run"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{ROOT}: make test\n"
    assert done.returncode == 7


def test_the_workflow_runs_the_same_two_commands():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    commands = re.findall(r"^ +- run: (.*)$", workflow, re.MULTILINE)
    assert commands[:2] == ["make test", "make demo"]


# --- the tree ---------------------------------------------------------------------------------------


def test_pins_live_in_one_file():
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        assert "==" in line or line.startswith("pip>="), line
    assert "==" not in (ROOT / "pyproject.toml").read_text()


def test_no_file_names_an_index_or_this_machine():
    """Where packages come from and where the checkout lies are the user's business."""
    patterns = [
        rb"pypi\.\w+\.?\w*/(simple|packages)",
        rb"pythonhosted\.",
        rb"download\.pytorch\.",
        rb"--(extra-)?index-url|--find-links",
    ]
    places = {ROOT, Path.home(), Path(sys.prefix), Path(sys.base_prefix)}
    patterns += [re.escape(f"{place}/").encode() for place in places if len(place.parts) > 2]
    pattern = re.compile(b"|".join(patterns))
    found = {
        str(path): match.group().decode()
        for path in repository_files()
        if path.name != Path(__file__).name
        and (match := pattern.search((ROOT / path).read_bytes()))
    }
    assert not found
