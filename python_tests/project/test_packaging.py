"""The wheel, the source archive, the Makefile, CI and the licences of the repository.

The wheel is built without CUDA from a copy of the files in git, so a file that is ignored by mistake makes a
test fail. It is then installed into empty environments, of this Python and of others, and used outside the
repository. Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.places import ROOT

from build_support.toolchain import find_ninja

BUILD = ROOT / "build" / "native"
# Without PYTHONPATH an environment sees only its own packages.
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def repository_files() -> list[Path]:
    """Files that git tracks or would add, relative to the root."""
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
    kwargs.setdefault("env", OUTSIDE)
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- the wheel --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built as in pip's isolation: in an environment with setuptools and ninja but without torch.

    The copy includes the object files, because no command depends on the tree's location or environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    copy_repository(source)
    stale = source / "specdec_ext" / "assets" / "__pycache__" / "stale.cpython-310.pyc"
    stale.parent.mkdir()
    stale.touch()
    for path in BUILD.rglob("*"):
        emulated = path.relative_to(BUILD).parts[0].startswith(("emulated", "ptx"))
        if (path.suffix == ".o" and not emulated) or path.name.startswith(".ninja_"):
            (source / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, source / path.relative_to(ROOT))
    python = empty_environment(folder / "builder")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.startswith(("setuptools", "_distutils_hack", "distutils-precedence")):
            (site_of(python) / path.name).symlink_to(path)
    ninja = Path(find_ninja()).parent
    check_call(
        sys.executable, "-m", "pip", "--python", python, "wheel", "--no-build-isolation", "--no-deps",
        "--no-index", "--wheel-dir", folder / "dist", source,
        env={**OUTSIDE, "SPECDEC_CUDA": "0", "PATH": f"{ninja}{os.pathsep}{OUTSIDE['PATH']}"},
    )  # fmt: skip
    (built,) = (folder / "dist").iterdir()
    return built


def empty_environment(folder: Path, python: str | Path = sys.executable) -> Path:
    """The Python of a new environment without packages."""
    check_call(python, "-m", "venv", "--without-pip", folder)
    return folder / "bin" / "python"


def site_of(python: Path) -> Path:
    answer = check_call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    return Path(answer.strip())


def install(wheel: Path, python: Path) -> None:
    check_call(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel
    )


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if name.startswith("specdec_ext/")}
    tracked = {str(path) for path in repository_files() if path.parts[0] == "specdec_ext"}
    assert package == tracked | {"specdec_ext/_ops.abi3.so", "specdec_ext/_host.abi3.so"}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"specdec_ext"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_wheel_is_for_every_python_of_this_platform(wheel):
    assert re.fullmatch(r"specdec_ext-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)


def test_build_does_not_require_torch():
    """In pip's isolation, requiring torch would download gigabytes."""
    requires = re.search(r"^requires = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert requires and requires[1] == '["setuptools>=77", "ninja"]'


def test_supported_transformers_are_the_ones_that_pip_installs():
    metadata = (ROOT / "pyproject.toml").read_text()
    bounds = re.search(r'"transformers>=(\d+\.\d+),<(\d+)\.(\d+)"', metadata)
    assert bounds
    oldest, major, first_unsupported = bounds.groups()
    newest = f"{major}.{int(first_unsupported) - 1}"
    for page in ("README.md", "docs/guide/quickstart.md"):
        assert f"transformers {oldest} to {newest}" in (ROOT / page).read_text(), page


@pytest.mark.slow
def test_metadata_has_readme_and_classifiers(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    metadata = archive.read(name).decode()
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    assert "\nClassifier: Programming Language :: Python :: 3\n" in metadata
    assert (ROOT / "README.md").read_text().splitlines()[0] in metadata


@pytest.mark.slow
def test_build_in_place_removes_old_modules(wheel):
    """The build describes itself and removes modules of earlier versions, which Python would prefer."""
    source = wheel.parent.parent / "source"
    (source / "specdec_ext" / "_host.cpython-310-x86_64-linux-gnu.so").touch()
    command = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
    printed = check_call(*command, cwd=source, env={**OUTSIDE, "SPECDEC_CUDA": "0"})
    assert "specdec_ext: CPU only, with " in printed and "(SPECDEC_CUDA=0)" in printed
    assert re.search(r"^specdec_ext: native libraries built in \d+ s$", printed, re.MULTILINE)
    built = sorted(path.name for path in (source / "specdec_ext").glob("*.so"))
    assert built == ["_host.abi3.so", "_ops.abi3.so"]


USE = """
import torch
import specdec_ext
from specdec_ext import assets, ops

shape = ops.tree_mask(torch.tensor([[-1, 0, 0, 1]]), torch.tensor([7]))
assert shape.positions.tolist() == [[7, 8, 8, 9]]
target, tokenizer = assets.load_target(), assets.load_tokenizer()
ids = tokenizer(assets.held_out_prompts()[0]["prompt"], return_tensors="pt")["input_ids"]
greedy = dict(max_new_tokens=8, do_sample=False)
expected = target.generate(ids, **greedy)
assert specdec_ext.generate(target, ids, **greedy).tolist() == expected.tolist()
print(specdec_ext.__file__)
"""


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(wheel, tmp_path):
    """Only the wheel is installed; torch and other dependencies are taken from this environment by path."""
    python = empty_environment(tmp_path / "venv")
    install(wheel, python)
    site = site_of(python)
    # A .pth file only extends the path, so an editable install in that folder has no effect here.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    used = check_call(python, "-I", "-c", USE, cwd=tmp_path)
    assert Path(used.strip()).is_relative_to(site)
    specdec = tmp_path / "venv" / "bin" / "specdec"
    version = check_call(specdec, "--version", cwd=tmp_path)
    assert "CUDA kernels: not built" in version
    demo = ("demo", "--prompts", "1", "--max-new-tokens", "8", "--drafter", "ngram")
    shown = check_call(specdec, *demo, cwd=tmp_path)
    assert "ngram" in shown


def other_pythons() -> list[Path]:
    """Interpreters on this machine of other supported versions, one per version."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    for place in (Path.home() / ".pyenv/versions", Path.home() / ".local/share/uv/python"):
        folders += sorted(place.glob("*/bin"))
    found: dict[str, Path] = {}
    for python in (path for folder in folders for path in sorted(folder.glob("python3.1[0-9]"))):
        code = "import sys, venv; print(*sys.version_info[:2])"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if done.returncode == 0:
            found.setdefault(done.stdout.strip(), python)
    found.pop(f"{sys.version_info[0]} {sys.version_info[1]}", None)
    return list(found.values())


HOST = """
from specdec_ext import _host
index = _host.NgramIndex(1, 2)
assert (len(index), index.match_length()) == (0, 0)
assert _host.draft_phases(1, [1], 1)[0] == ("new", 0, "fc", 0, 0, 1)
try:
    _host.NgramIndex(0, 2)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_wheel_is_for_another_python(wheel, tmp_path):
    """Tests the host module, the only one built with Python's headers; torch is not installed there."""
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python from 3.10 on is on this machine")
    for number, other in enumerate(pythons):
        python = empty_environment(tmp_path / str(number), other)
        install(wheel, python)
        assert check_call(python, "-I", "-c", HOST) == "min_ngram must be at least 1, got 0\n"


def test_modules_and_their_files_are_installed(tmp_path):
    """What a wheel holds beside the native libraries, without building those."""
    copy_repository(tmp_path / "source")
    command = (sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", tmp_path / "built")
    check_call(*command, cwd=tmp_path / "source")
    built = {
        str(path.relative_to(tmp_path / "built")) for path in (tmp_path / "built").rglob("*.*")
    }
    tracked = {str(path) for path in repository_files() if path.parts[0] == "specdec_ext"}
    assert built == tracked


def test_sources_are_complete(tmp_path):
    """The source archive has all files that building and testing need."""
    copy_repository(tmp_path / "source")
    code = "from setuptools.build_meta import build_sdist; print(build_sdist('..'))"
    printed = check_call(sys.executable, "-c", code, cwd=tmp_path / "source")
    with tarfile.open(tmp_path / printed.splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("specdec_ext", "csrc", "build_support", "python_tests", "profiling/", "deploy/")
    needed = {str(path) for path in repository_files() if path.as_posix().startswith(folders)}
    needed = {name for name in needed if not name.startswith("profiling/results")}
    assert needed - names == set()


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
    """A checkout that was set up an hour ago."""
    for name in ("Makefile", "requirements-dev.txt", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc/op.cpp", "build_support/native.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    for age, names in (
        (7200, ("requirements-dev.txt", "setup.py", "pyproject.toml")),
        (7200, ("csrc/op.cpp", "build_support/native.py")),
        (3600, (".venv/.requirements.stamp",)),
        (3500, (".venv/.build-cuda-auto.stamp",)),
    ):
        for name in names:
            (tmp_path / name).touch()
            at = (tmp_path / "Makefile").stat().st_mtime - age
            os.utime(tmp_path / name, (at, at))
    return tmp_path


def planned(checkout: Path, *arguments: str, target: str = "test") -> list[str]:
    """The steps that `make` would run for a target, in order."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("SPECDEC_CUDA", "MAKEFLAGS")
    }
    plan = check_call("make", "-n", target, *arguments, cwd=checkout, env=environment)
    steps = {
        "-m venv": "venv",
        "install --quiet transformers==5.4.0": "transformers",
        "--requirement": "requirements",
        "build_ext": "build",
        "--editable": "install",
        "-m pytest": "pytest",
    }
    found = [
        step for line in plan.splitlines() for pattern, step in steps.items() if pattern in line
    ]
    return list(dict.fromkeys(found))  # pytest runs twice, the second time with sanitizers


@needs_make
def test_new_checkout_is_set_up_first(checkout):
    shutil.rmtree(checkout / ".venv")
    assert planned(checkout) == ["venv", "requirements", "build", "install", "pytest"]


@needs_make
def test_second_run_only_tests(checkout):
    assert planned(checkout) == ["pytest"]


@needs_make
@pytest.mark.parametrize(
    "edited, steps",
    [
        ("csrc/op.cpp", ["build", "install", "pytest"]),
        ("setup.py", ["build", "install", "pytest"]),
        ("build_support/native.py", ["build", "install", "pytest"]),
        ("requirements-dev.txt", ["requirements", "build", "install", "pytest"]),
    ],
)
def test_edit_repeats_only_dependent_steps(checkout, edited, steps):
    (checkout / edited).touch()
    assert planned(checkout) == steps


@needs_make
def test_another_choice_of_kernels_rebuilds(checkout):
    assert planned(checkout, "SPECDEC_CUDA=0") == ["build", "install", "pytest"]


@needs_make
def test_make_shows_the_output_of_the_compilers(checkout):
    """pip would hide the output of a build, which takes minutes."""
    (checkout / "csrc" / "op.cpp").touch()
    plan = check_call("make", "-n", "demo", cwd=checkout)
    (line,) = [line for line in plan.splitlines() if "build_ext" in line]
    assert line == ".venv/bin/python setup.py --quiet build_ext --inplace"


@needs_make
def test_another_transformers_is_a_layer_over_the_environment(checkout):
    """The layer is made once per version, with the interpreter of the environment below it."""
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


@pytest.mark.parametrize("installs", [True, False])
def test_ci_installs_programs_or_says_what_is_skipped(tmp_path, installs):
    """Every command but bash and dirname is a fake, so nothing is installed."""
    fakes = {
        "make": "echo make",
        "id": "echo 0",
        "apt-get": f"""echo "apt-get $*"; [ {installs} = True ] || exit 1
            if [ "$1" = install ]; then cp {tmp_path}/id "{tmp_path}/${{5/prometheus/promtool}}"; fi""",
    }
    for name, script in fakes.items():
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname", "cp"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [ROOT / ".ci" / "run"], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("make\n", 0)
    assert "apt-get update" in done.stderr
    for program, package in (("chromium", "chromium"), ("promtool", "prometheus")):
        assert (f"--no-install-recommends {package}" in done.stderr) == installs
        assert (f"no {program}: the tests that need it are skipped" in done.stderr) != installs


def test_workflow_runs_the_same_two_commands():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    commands = re.findall(r"^ +- run: (.*)$", workflow, re.MULTILINE)
    assert commands[:2] == ["make test", "make demo"]


# --- the tree ---------------------------------------------------------------------------------------


def test_pins_are_in_one_file():
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        assert "==" in line or line.startswith("pip>="), line
    assert "==" not in (ROOT / "pyproject.toml").read_text()


def test_no_file_names_an_index_or_this_machine():
    """The repository must not depend on a package index or on the location of a checkout."""
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
