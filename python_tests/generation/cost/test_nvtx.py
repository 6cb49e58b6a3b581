"""The NVTX ranges of a generate call. NVTX loads ``nvtx_recorder.c`` in the same way as Nsight."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from helpers.places import HELPERS

from specdec_ext.cli.version import _cuda_kernels_built

GENERATE = """
import torch
from specdec_ext import assets, generate, ops

ops.tree_mask(torch.tensor([[-1, 0]]), torch.tensor([0]))
try:
    ops.tree_mask(torch.tensor([[-1, 0]]), torch.tensor([0, 0]))
except ValueError:
    pass
target, tokenizer = assets.load_target(), assets.load_tokenizer()
ids = tokenizer("def f(x):", return_tensors="pt")["input_ids"]
generate(target, ids, max_new_tokens=4, do_sample=False, drafter="ngram")
"""


@pytest.fixture(scope="module")
def ranges(tmp_path_factory) -> list[tuple[str, ...]]:
    """Every opened range, in order, each after the ranges around it."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs the CUDA toolkit's NVTX headers")
    folder = tmp_path_factory.mktemp("nvtx")
    library, record = folder / "recorder.so", folder / "record.txt"
    flags = ["-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([nvcc, *flags, HELPERS / "nvtx_recorder.c", "-o", library], check=True)
    environment = {"NVTX_INJECTION64_PATH": str(library), "NVTX_RECORD": str(record)}
    subprocess.run([sys.executable, "-c", GENERATE], env={**os.environ, **environment}, check=True)
    opened, stack = [], []
    for line in record.read_text().splitlines():
        action, domain, *name = line.split()
        if domain != "specdec":
            continue
        if action == "push":
            stack.append(name[0])
            opened.append(tuple(stack))
        else:
            stack.pop()
    assert not stack, "a range was left open"
    return opened


def test_phases_of_generate_are_ranges(ranges):
    outermost = [each[0] for each in ranges if len(each) == 1 and each[0] != "tree_mask"]
    assert outermost[0] == "prefill"
    steps = outermost[1:]
    assert steps and steps == ["draft", "verify", "commit"] * (len(steps) // 3)


@pytest.mark.skipif(not _cuda_kernels_built(), reason="ops have ranges in builds with nvcc")
def test_every_op_call_is_a_range(ranges):
    assert ranges.count(("tree_mask",)) == 1  # not the call whose arguments were refused
    inner = [each for each in ranges if each[-1] == "verify_match"]
    assert inner[0] == ("prefill", "verify_match")
    assert set(inner[1:]) == {("verify", "verify_match")}
