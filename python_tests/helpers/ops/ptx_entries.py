"""Compiles PTX text and launches its entries in the emulator."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
from pathlib import Path

import torch
from helpers.ops import emulation
from helpers.places import ROOT
from torch import Tensor

from build_support import native
from build_support.ptx.cpp import translate

HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n"


def compile_text(
    text: str, folder: Path, name: str = "entries", optimise: bool = True
) -> ctypes.CDLL:
    """The library of a PTX file's translation, ``lib<name>.so`` in the folder.

    Raises:
        build_support.ptx.syntax.PtxError: if the text is not translated.
    """
    source, path = folder / f"{name}.cpp", folder / f"lib{name}.so"
    source.write_text(translate(text, f"{name}.ptx"))
    toolkit = f"-I{ROOT}/csrc/testing/emulation/toolkit"
    subprocess.check_call(
        [
            *shlex.split(os.environ.get("CXX") or "c++"),
            *shlex.split(f"{native.CXX_FLAGS} {native.include_flags()} {toolkit} {native.PTX_FLAGS}"),
            *([] if optimise else ["-O0"]),
            "-shared", str(source), "-o", str(path),
        ]
    )  # fmt: skip
    return ctypes.CDLL(str(path))


def launch(
    entries: ctypes.CDLL,
    name: str,
    *tensors: Tensor,
    blocks: int = 1,
    threads: int = 32,
    dynamic: int = 0,
) -> str | None:
    """Launch an entry that takes pointers to the tensors; returns the emulator's message."""
    function = emulation.library().specdec_launch_entry
    function.restype = ctypes.c_char_p
    params = torch.tensor([tensor.data_ptr() for tensor in tensors])
    message = function(
        ctypes.c_void_p(emulation.entry_address(entries, f"ptx_{name}")),
        ctypes.c_uint(blocks),
        ctypes.c_uint(threads),
        ctypes.c_int64(dynamic),
        ctypes.c_void_p(params.data_ptr()),
        ctypes.c_size_t(8 * len(tensors)),
    )
    return message.decode() if message else None


def entry_of(text: str, kernel: str) -> str:
    """The PTX of a file with only the entries whose names contain ``kernel``."""
    first, *entries = re.split(r"(?=^(?:\.visible )?\.entry )", text, flags=re.MULTILINE)
    files = "".join(re.findall(r"^\s*\.file[^\n]*\n", text, re.MULTILINE))
    chosen = [each for each in entries if kernel in each.split("(", 1)[0]]
    assert chosen, f"no entry {kernel}"
    return first + "".join(chosen) + files
