"""The functions that csrc/ops/torch_abi/shim.h declares, against the headers of the installed torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.places import ROOT

from specdec_ext.ops import _library

SHIM = ROOT / "csrc" / "ops" / "torch_abi" / "shim.h"
INCLUDE = Path(torch.__file__).parent / "include"
HEADER = "torch/csrc/stable/c/shim.h"

needs_headers = pytest.mark.skipif(
    shutil.which("c++") is None or not (INCLUDE / HEADER).exists(),
    reason="needs a C++ compiler and torch's headers",
)


def compile_side_by_side(tmp_path: Path, shim: str) -> subprocess.CompletedProcess[str]:
    """Compile a file that compares the types of both declarations of every function."""
    (tmp_path / "shim.h").write_text(shim)
    names = re.findall(r"\b((?:aoti_)?torch_\w+)\(", re.sub(r"//.*", "", shim))
    assert len(names) > 30 and "torch_library_impl" in names
    lines = [
        f"#include <{HEADER}>",
        "#include <type_traits>",
        '#include "shim.h"',
        "static_assert(std::is_same_v<StableIValue, specdec::torch_abi::StableValue>);",
        *(
            f"static_assert(std::is_same_v<decltype(::{name}), decltype(specdec::torch_abi::{name})>);"
            for name in names
        ),
    ]
    source = tmp_path / "side_by_side.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = ["c++", "-std=c++20", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    return subprocess.run(
        [*command, f"-I{tmp_path}", "-isystem", INCLUDE, source], capture_output=True, text=True
    )


@needs_headers
def test_declarations_are_those_of_torch(tmp_path):
    done = compile_side_by_side(tmp_path, SHIM.read_text())
    assert done.returncode == 0, done.stderr


@needs_headers
@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("get_dim(TensorHandle tensor, int64_t*", "get_dim(TensorHandle tensor, int32_t*"),
        ("Error torch_delete_list(", "Error torch_forget_list("),
        ("using StableValue = uint64_t", "using StableValue = int64_t"),
    ],
    ids=["argument", "name", "value"],
)
def test_different_declaration_does_not_compile(tmp_path, ours, other):
    shim = SHIM.read_text()
    assert ours in shim
    assert compile_side_by_side(tmp_path, shim.replace(ours, other)).returncode != 0


def test_error_names_a_torch_that_is_too_old(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError) as error:
        _library._load_library()
    assert str(error.value) == (
        "specdec_ext needs torch >= 2.10, and torch 2.9.1+cpu is installed: pip install --upgrade torch"
    )
