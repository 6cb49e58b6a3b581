"""The choice of GPU architectures in build_support/architectures.py.

Tested with the architecture lists of four nvcc releases and with every kind of TORCH_CUDA_ARCH_LIST.
"""

from __future__ import annotations

import pytest

from build_support import BuildError, architectures
from build_support.architectures import choose, read_nvcc_list, visible_gpus

# Output of `nvcc --list-gpu-code` of each release, without "sm_".
PRINTED = {
    "12.0": "50 52 53 60 61 62 70 72 75 80 86 87 89 90",
    "12.4": "50 52 53 60 61 62 70 72 75 80 86 87 89 90",
    "12.8": "50 52 53 60 61 62 70 72 75 80 86 87 89 90 100 101 120",
    "13.0": "75 80 86 87 88 89 90 100 110 103 120 121",
}
KNOWN = {
    release: read_nvcc_list("".join(f"sm_{number}\n" for number in numbers.split()))
    for release, numbers in PRINTED.items()
}
UP_TO_HOPPER = [
    "-gencode=arch=compute_80,code=[sm_80,sm_89]",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
]
UP_TO_BLACKWELL = [
    "-gencode=arch=compute_80,code=[sm_80,sm_89]",
    "-gencode=arch=compute_90,code=[sm_90,sm_100,sm_120,compute_90]",
]


@pytest.mark.parametrize(
    ("release", "flags"),
    [
        ("12.0", UP_TO_HOPPER),
        ("12.4", UP_TO_HOPPER),
        ("12.8", UP_TO_BLACKWELL),
        ("13.0", UP_TO_BLACKWELL),
    ],
)
def test_default_is_every_known_family_and_ptx_for_later_ones(release, flags):
    for unset in (None, "", " "):
        chosen = choose(unset, KNOWN[release], [], f"nvcc {release}")
        assert chosen.nvcc_flags() == flags
        assert chosen.reason == f"all that nvcc {release} supports, because no GPU was found"


@pytest.mark.parametrize(
    ("release", "visible", "machine_code", "ptx"),
    [
        ("13.0", [86], [86], [80]),
        ("13.0", [86, 86, 90], [86, 90], [90]),
        ("13.0", [110], [110], [90]),
        ("13.0", [75, 89], [89], [80]),
        ("12.4", [120], [], [90]),  # newer than nvcc: only PTX
        ("12.4", [80, 120], [80], [90]),
    ],
)
def test_gpus_of_the_machine_are_chosen(release, visible, machine_code, ptx):
    chosen = choose(None, KNOWN[release], visible)
    assert list(chosen.machine_code) == machine_code
    assert list(chosen.ptx) == ptx
    assert chosen.reason == "the GPUs of this machine"


def test_gpus_without_machine_code_are_noted():
    assert choose(None, KNOWN["13.0"], [75, 89]).notes == (
        "a GPU of this machine has 7.5, left out because the kernels need 8.0 or later",
    )
    assert choose(None, KNOWN["12.4"], [120], "nvcc 12.4").notes == (
        "nvcc 12.4 does not support 12.0: the driver will compile PTX for it at the first use",
    )
    only_old = choose(None, KNOWN["13.0"], [75])
    assert only_old.nvcc_flags() == UP_TO_BLACKWELL and "7.5" in only_old.notes[0]


@pytest.mark.parametrize(
    ("requested", "machine_code", "ptx"),
    [
        ("8.0", [80], []),
        ("8.6 9.0+PTX", [86, 90], [90]),
        ("8.0;8.6+ptx;9.0a", [80, 86, 90], [80]),
        ("7.0;7.5;8.0", [80], []),
        ("Volta,Ampere;Hopper", [80, 86, 90], []),
        ("ada+PTX", [89], [80]),
        ("Ampere+Tegra", [87], []),
        ("Blackwell", [100, 103, 120, 121], []),
        ("10.0f", [100], []),
        ("native", [89, 90], []),
        ("native+PTX", [89, 90], [90]),
        ("all", [80, 89, 90, 100, 120], [90]),
    ],
)
def test_list_is_parsed(requested, machine_code, ptx):
    chosen = choose(requested, KNOWN["13.0"], [89, 90])
    assert (list(chosen.machine_code), list(chosen.ptx)) == (machine_code, ptx)
    assert chosen.reason == f"TORCH_CUDA_ARCH_LIST={requested!r}"


def test_too_old_architectures_of_a_list_are_dropped_with_a_note():
    chosen = choose("5.2 7.0 7.5 8.0 8.6", KNOWN["12.4"], [])
    assert chosen.machine_code == (80, 86)
    assert chosen.notes == (
        "TORCH_CUDA_ARCH_LIST names 5.2, 7.0, 7.5, left out because the kernels need 8.0 or later",
    )


def test_name_means_the_architectures_that_nvcc_knows():
    assert choose("Blackwell", KNOWN["12.8"], []).machine_code == (100, 120)


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("7.0;7.5", "has no architecture that specdec_ext can be built for: name 8.0 or later"),
        ("Turing", "has no architecture that specdec_ext can be built for"),
        (";", "has no architecture that specdec_ext can be built for"),
        (
            "8.0;hoper",
            r"'hoper' is not an architecture; expected numbers such as 8.6 or 9.0\+PTX, or nat",
        ),
        ("sm_80", "'sm_80' is not an architecture"),
        ("80", "'80' is not an architecture"),
        ("10.0", "names 10.0, which nvcc 12.4 does not support: leave it out or install a newer"),
        ("Blackwell", "names Blackwell, which nvcc 12.4 does not support"),
        ("native", "says native, but nvidia-smi shows no GPU"),
    ],
)
def test_list_that_nvcc_lacks_is_refused(requested, message):
    with pytest.raises(BuildError, match=message):
        choose(requested, KNOWN["12.4"], [], "nvcc 12.4")


def test_gpu_that_nvcc_lacks_is_refused():
    with pytest.raises(BuildError, match=r"nvcc 11\.0 supports no GPU architecture from 8.0 on"):
        choose(None, {70, 75}, [], "nvcc 11.0")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("printf '8.9\\n12.0\\n'", [89, 120]),
        ("printf '[N/A]\\n'", []),
        ("echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2", []),
        ("echo 'NVIDIA-SMI has failed' ; exit 9", []),
    ],
    ids=["two", "unknown", "old driver", "no driver"],
)
def test_visible_gpus_are_counted(tmp_path, monkeypatch, script, found):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_gpus() == found


def test_machine_without_nvidia_smi_has_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []


def test_every_default_has_a_family():
    assert [architectures.family_of(number) for number in architectures.DEFAULTS] == [
        80, 80, 90, 90, 90,
    ]  # fmt: skip
