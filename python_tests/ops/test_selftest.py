"""The C++ self test: the emulator, CPU ops against examples, and small CUDA kernels compiled for the host
against the CPU ops in three thread orders, all under AddressSanitizer and UBSan."""

import shutil
import subprocess

import pytest
from helpers.places import ROOT


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_the_self_test_passes_under_sanitizers():
    build = ROOT / "build" / "cmake-sanitize"
    for command in (
        ["cmake", "-S", ROOT, "-B", build, "-DSPECDEC_SANITIZE=ON"],
        ["cmake", "--build", build, "--parallel", "2"],
        ["ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (build / "compile_commands.json").exists()
