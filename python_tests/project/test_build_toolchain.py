"""Each requirement of a build that is missing is reported in one sentence before the build starts.

Shell scripts stand in for compilers that are not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.places import ROOT

from build_support import BuildError, native, toolchain
from build_support.architectures import VARIABLE


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def fake_nvcc(
    toolkit: Path, release: str = "12.4", codes: str = "75 80 90", probe: str = ""
) -> Path:
    """A script in place of a toolkit's nvcc: it answers queries and runs `probe` to compile."""
    lines = "".join(f"sm_{code}\\n" for code in codes.split())
    return program(
        toolkit / "bin" / "nvcc",
        f"""case "$*" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.1" ;;
  --list-gpu-code) printf '{lines}' ;;
  *--dryrun*)
    echo '#$ INCLUDES="-I{toolkit}/bin/../include"  ' >&2
    echo '#$ SYSTEM_INCLUDES="-isystem" "{toolkit}/bin/../include/cccl"  ' >&2
    echo '#$ LIBRARIES=  "-L{toolkit}/bin/../lib/stubs" "-L{toolkit}/bin/../lib"' >&2 ;;
  *) {probe or ":"} ;;
esac""",
    )


@pytest.fixture
def toolkit(tmp_path, monkeypatch) -> Path:
    """A folder for a CUDA toolkit, on a machine with a C++ compiler and without CUDA."""
    for variable in ("SPECDEC_CUDA", "NVCC", "CUDA_HOME", VARIABLE, "CXX", "SPECDEC_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    tools = tmp_path / "tools"
    program(tools / "c++", 'case "$*" in -print-file-name=*) echo none ;; esac')
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    return tmp_path / "cuda"


def test_compilers_of_this_machine_pass_the_checks():
    tools = toolchain.find_toolchain()
    assert Path(tools.python_include, "Python.h").exists()
    assert shutil.which(tools.ninja)


def test_toolkit_is_found(toolkit, monkeypatch):
    nvcc = fake_nvcc(toolkit)
    (toolkit / "lib").mkdir()
    (toolkit / "lib" / "libcudart_static.a").touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    cuda, _ = toolchain.find_cuda("c++")
    assert (cuda.nvcc, cuda.name) == (str(nvcc), "nvcc 12.4")
    assert cuda.includes == (f"-isystem {toolkit}/include", f"-isystem {toolkit}/include/cccl")
    assert cuda.runtime[0] == f"{toolkit}/lib/libcudart_static.a"
    assert str(cuda.architectures) == "sm_80, sm_90, PTX of compute_90"


def test_toolkit_with_only_the_shared_runtime_is_found(toolkit, monkeypatch):
    """As pip and conda install it: no static library, and a file name with the version."""
    monkeypatch.setenv("NVCC", str(fake_nvcc(toolkit)))
    (toolkit / "lib").mkdir()
    (toolkit / "lib" / "libcudart.so.12").touch()
    cuda, _ = toolchain.find_cuda("c++")
    assert cuda.runtime[:2] == (f"{toolkit}/lib/libcudart.so.12", f"-Xlinker -rpath={toolkit}/lib")


def test_toolkit_without_a_runtime_is_refused(toolkit, monkeypatch):
    monkeypatch.setenv("NVCC", str(fake_nvcc(toolkit)))
    with pytest.raises(
        BuildError, match=r"has no runtime library to link: install nvidia-cuda-run"
    ):
        toolchain.find_cuda("c++")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"release": "11.8"}, r"need nvcc 12.0 or later, but .*/nvcc is nvcc 11.8: put a newer one"),
        ({"probe": "echo 'crt/host_config.h: error: unsupported GNU version!' >&2; exit 1"},
         r"can't compile with c\+\+ \(crt/host_config.h: error: unsupported GNU version!\): complete"),
    ],
    ids=["old", "host compiler"],
)  # fmt: skip
def test_unusable_nvcc_is_refused(toolkit, monkeypatch, arguments, message):
    monkeypatch.setenv("NVCC", str(fake_nvcc(toolkit, **arguments)))
    with pytest.raises(BuildError, match=message):
        toolchain.find_cuda("c++")


def test_environment_variables_choose_nvcc(toolkit, monkeypatch):
    not_found = "nvcc not found; add it to PATH to build the CUDA kernels"
    assert toolchain.find_cuda("c++") == (None, not_found)
    monkeypatch.setenv("SPECDEC_CUDA", "1")
    with pytest.raises(BuildError, match="SPECDEC_CUDA=1, but nvcc was not found: install it"):
        toolchain.find_cuda("c++")
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    with pytest.raises(BuildError, match="NVCC=/nowhere/nvcc is not a program"):
        toolchain.find_cuda("c++")
    monkeypatch.setenv("SPECDEC_CUDA", "0")
    assert toolchain.find_cuda("c++") == (None, "SPECDEC_CUDA=0")
    monkeypatch.setenv("SPECDEC_CUDA", "yes")
    with pytest.raises(BuildError, match="SPECDEC_CUDA='yes'; expected auto, 0 or 1"):
        toolchain.find_cuda("c++")


def test_compiler_without_cxx20_is_refused(toolkit, monkeypatch):
    old = program(toolkit / "g++", 'echo "g++: error: unrecognized option -std=c++20" >&2; exit 1')
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(BuildError, match=r"can't compile C\+\+20 \(g\+\+: error: unrecognized opt"):
        toolchain.find_cxx()


def test_missing_ninja_is_reported(toolkit, monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="needs ninja to build: pip install ninja"):
        toolchain.find_ninja()


def test_missing_python_headers_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BuildError, match=r"has no Python.h: install python3-dev"):
        toolchain.find_python_include()


@pytest.mark.parametrize("installed", ["2.9.1", "1.13.0+cu117"])
def test_too_old_torch_is_refused(monkeypatch, installed):
    monkeypatch.setattr(toolchain, "version", lambda package: installed)
    with pytest.raises(
        BuildError, match=f"needs torch >= 2.10, but this environment has {installed[:3]}"
    ):
        toolchain.check_torch()


@pytest.mark.parametrize("installed", ["2.10.0", "2.14.1+cu130", "3.0.0a0+git1"])
def test_supported_torch_is_accepted(monkeypatch, installed):
    monkeypatch.setattr(toolchain, "version", lambda package: installed)
    toolchain.check_torch()


# --- messages through pip -----------------------------------------------------------------------------


def metadata(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Ask for the package's metadata, as pip does before it downloads dependencies."""
    return subprocess.run(
        [sys.executable, ROOT / "setup.py", "--quiet", "dist_info", "--output-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "SPECDEC_CUDA": "0", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"CXX": "no-such-compiler"}, "specdec_ext needs a C++20 compiler, but no-such-compiler is not"),
        ({"SPECDEC_CUDA": "1", "NVCC": "/nowhere/nvcc"}, "NVCC=/nowhere/nvcc is not a program"),
    ],
    ids=["compiler", "nvcc"],
)  # fmt: skip
def test_pip_shows_one_sentence_and_nothing_else(tmp_path, environment, sentence):
    done = metadata(tmp_path, **environment)
    assert done.returncode == 1
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_old_setuptools_is_refused_in_one_sentence(tmp_path):
    """A new environment of Python 3.11 has setuptools 65, which can't read the licence in pyproject.toml."""
    package = tmp_path / "setuptools"
    for name, text in {
        "__init__": "__version__ = '65.5.0'\nExtension = setup = None",
        "command/__init__": "",
        "command/build_ext": "build_ext = object",
        "command/dist_info": "dist_info = object",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text)
    done = metadata(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        "specdec_ext needs setuptools >= 77 to build, but this environment has 65.5.0: "
        "pip install --upgrade setuptools, or leave out --no-build-isolation\n"
    )


# --- the plan of the build ----------------------------------------------------------------------------


def tools_with(cuda: toolchain.Cuda | None) -> toolchain.Toolchain:
    return toolchain.Toolchain("c++", "ninja", "/usr/include/python3", cuda, "nvcc not found")


@pytest.fixture
def cuda(toolkit, monkeypatch) -> toolchain.Cuda:
    nvcc = fake_nvcc(toolkit)
    (toolkit / "lib").mkdir()
    (toolkit / "lib" / "libcudart_static.a").touch()
    return toolchain.read_cuda(str(nvcc), "c++")


def test_build_describes_itself(cuda):
    assert native.describe(tools_with(None), jobs=2)[0] == "CPU only, with c++ (nvcc not found)"
    with_cuda = native.describe(tools_with(cuda), jobs=2)
    assert with_cuda[0] == (
        "CPU, with c++, and CUDA, with nvcc 12.4, for sm_80, sm_90, PTX of compute_90 "
        "(all that nvcc 12.4 supports, because no GPU was found)"
    )
    assert "about" in with_cuda[1] and "min with 2 jobs" in with_cuda[1]


def test_commands_depend_neither_on_torch_nor_on_the_folder(cuda):
    """Otherwise a build in isolation would compile everything again."""
    for tools in (tools_with(None), tools_with(cuda)):
        text = native.ninja_file(tools)
        assert "kernels/tree/tree_mask.cu.o" in text
        assert str(ROOT) not in text and "site-packages" not in text


def test_ptx_is_translated_only_with_nvcc(cuda):
    assert "ptx-sm_" not in native.ninja_file(tools_with(None))
    text = native.ninja_file(tools_with(cuda))
    for path in native.kernel_sources():
        assert f"build ptx-sm_90/{path.parent.name}/{path.stem}.o: cxx" in text
    assert "default libraries\n" in text  # `pip install` compiles none of them


def test_spill_is_an_error_only_in_ci(cuda, monkeypatch):
    assert "-Xptxas" not in native.nvcc_command(cuda, "c++")
    monkeypatch.setenv("SPECDEC_STRICT", "1")
    assert "--warning-as-error" in native.nvcc_command(cuda, "c++")
