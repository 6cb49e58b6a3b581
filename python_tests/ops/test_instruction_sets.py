"""The bits of the CPU ops do not depend on the instruction set.

A process chooses its instruction set once, at its first op. So one process imports the tests of all ops and
forks a child for each instruction set, which runs ``isa_results`` of every module.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ops.head_op_cases import assert_same_draft

from specdec_ext import ops

ISAS = ["baseline", "avx2", "avx512", "amx-emulated"]
OPS = [
    "tree_attention",
    "verify_match",
    "verify_sampled",
    "sample_filter",
    "adjust_logits",
    "linear",
    "linear_codes",
    "draft_head",
    "decoder_layers",
]
# Results that matrix units compute.
BFLOAT16_ON_UNITS = {
    *(("linear", number) for number in range(6, 10)),
    # bfloat16 of each kind; few rows of levels are the only ones that matrix units do not multiply
    *(("linear_codes", 5 * kind + number) for kind in range(6) for number in (2, 3, 4)),
    ("linear_codes", 33),
    ("tree_attention", 3),
}
SCRIPT = """
import importlib, os, sys, torch

folder, isas, ops = (each.split(",") for each in sys.argv[1:])
functions = {op: importlib.import_module(f"test_ops_{op}").isa_results for op in ops}
functions["instructions"] = importlib.import_module("specdec_ext").ops.cpu_instructions
for isa in isas:
    if not os.fork():
        os.environ["SPECDEC_CPU_ISA"] = isa
        torch.save({op: results() for op, results in functions.items()}, f"{folder[0]}/{isa}")
        os._exit(0)
sys.exit(any([os.wait()[1] for _ in isas]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A file of results for each instruction set."""
    folder = tmp_path_factory.mktemp("isas")
    command = [sys.executable, "-c", SCRIPT, folder, ",".join(ISAS), ",".join(OPS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*map(str, command)], env=environment, check=True)
    return folder


@functools.cache
def results_here(op: str) -> list[Any]:
    """The results of this process, which uses the best instruction set of the machine."""
    return importlib.import_module(f"test_ops_{op}").isa_results()


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", OPS)
def test_instruction_sets_do_not_change_the_result(op, isa, folder):
    """Two have bits of their own: the matrix products of x86's baseline, which has no fused multiply-add, and
    bfloat16 on matrix units.
    """
    here = ops.cpu_instructions()
    for number, (theirs, ours) in enumerate(
        zip(torch.load(folder / isa)[op], results_here(op), strict=True)
    ):
        is_tiled = (op, number) in BFLOAT16_ON_UNITS
        differ_in_units = isa.startswith("amx") != here.startswith("amx")
        if is_tiled and differ_in_units:  # weights of sums are bfloat16, too
            largest = float(ours.abs().max())
            torch.testing.assert_close(theirs, ours, rtol=2.0**-6, atol=largest * 2.0**-8)
        elif isa == "baseline" and op.startswith("linear"):
            torch.testing.assert_close(theirs, ours)
        elif isa == "baseline" and op == "draft_head" and number % 4 < 2:
            assert_same_draft(theirs, ours)
        elif isa == "baseline" and op == "draft_head":  # bfloat16 may round in other places
            torch.testing.assert_close(theirs[2][:, 1], ours[2][:, 1], rtol=0.05, atol=0.05)
        else:
            for their, our in zip(*map(tensors, (theirs, ours)), strict=True):
                assert torch.equal(their, our) and torch.equal(their.signbit(), our.signbit())


def test_the_variable_chooses_the_instructions(folder):
    """What the processor does not have is replaced by the best that it has."""
    chosen = {isa: torch.load(folder / isa)["instructions"] for isa in ISAS}
    assert chosen["baseline"] == "baseline" and chosen["amx-emulated"] == "amx-emulated"
    assert not chosen["avx512"].startswith("amx")
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert (chosen["avx2"], chosen["avx512"]) == ("avx2", "avx512")
