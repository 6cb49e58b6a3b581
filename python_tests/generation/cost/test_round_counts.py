"""The copies of a round of ``generate`` between host and GPU are bounded."""

import json
import subprocess
import sys

import pytest
from helpers.places import ROOT

PROFILING = ROOT / "profiling"
TO_HOST, FROM_HOST = "to host", "from host"


COUNTED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from generation.cuda_like import CudaLike, cuda_like
import torch

seen = []
with cuda_like(lambda kind, site: seen.append(kind)):
    given = CudaLike(torch.arange(6.0).view(2, 3))
    for act in [
        lambda: given[:, 1:].t(),
        lambda: given + 1,
        lambda: given.sum().item(),
        lambda: bool(given.sum() > 3),
        lambda: given.tolist(),
        lambda: given.cpu(),
        lambda: given[given > 2],
        lambda: given.nonzero(),
        lambda: torch.tensor([1, 2], device="cuda:0"),
        lambda: torch.ones(2, device="cuda:0"),
        lambda: torch.ones(2).to("cuda:0"),
        lambda: given[[0, 1]],
        lambda: given[torch.tensor([0, 1])],
        lambda: given.__setitem__((0, 0), 7.0),
    ]:
        seen.clear()
        act()
        print(", ".join(seen))
    assert given.inner.tolist() == [[7.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    try:
        given + torch.ones(3)
    except RuntimeError as error:
        print(error)

from generation import count_round

count_round.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """What another process prints and writes, because counting changes torch."""
    stem = tmp_path_factory.mktemp("rounds") / "counts"
    command = [sys.executable, "-c", COUNTED, PROFILING, "--new-tokens", 20, "--out", stem]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(stem.with_suffix(".json").read_text())["rows"]


@pytest.fixture(scope="module")
def cases(counted):
    """``(drafter, batch, text) -> numbers``."""
    return {(case["drafter"], case["batch"], case["text"]): case for case in counted[1]}


@pytest.mark.parametrize("text", ["greedy", "sampled"])
@pytest.mark.parametrize("batch", ["1", "ragged 4"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "head chain", "head tree"])
def test_round_has_at_most_three_copies(cases, drafter, batch, text):
    """One has the numbers of the round for the device, one the verdict, and one a tree drafted on the
    device."""
    case = cases[drafter, batch, text]
    assert case["rounds"] > 1
    assert case["most"][FROM_HOST] == 1, case["places"][FROM_HOST]
    expected = 2 if drafter.startswith("head") else 1
    assert case["most"][TO_HOST] == expected, case["places"][TO_HOST]


@pytest.mark.parametrize("drafter", ["ngram", "head chain", "head tree"])
def test_round_in_which_a_row_ends_has_few_more_copies(cases, drafter):
    """The rows to move, and where the row ended in its block, are known only after the verdict's copy."""
    ended = [case for (name, *_), case in cases.items() if name == drafter]
    ended = [case for case in ended if case["rounds in which a row ends"]]
    assert ended
    for case in ended:
        assert case["most then"][FROM_HOST] <= 3
        assert case["most then"][TO_HOST] <= 2


def test_plain_round_launches_four_kernels_beside_the_model(cases):
    """Three ops and the filling of one tensor; the model has 6 layers of 36 kernels, and 13 more."""
    assert cases["none", "1", "greedy"]["median"]["launch"] <= 236


def test_kinds_of_calls_are_counted(counted):
    assert counted[0].splitlines()[:15] == [
        "",
        "launch",
        "launch, to host",
        "launch, launch, to host",
        "to host",
        "to host",
        "launch, to host, launch",
        "to host",
        "from host",
        "launch",
        "from host",
        "from host, launch",
        "from host, launch",
        "launch",
        "add was given tensors of cuda:0 and of the CPU",
    ]
