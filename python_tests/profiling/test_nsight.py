"""The Nsight script: its command lines, the profiled work, and its message if Nsight is not installed."""

from __future__ import annotations

import shlex
import shutil
import sys

import pytest
from gpu import nsight


def command_line(*arguments: str) -> str:
    options = nsight.parse([*arguments, "--device", "cuda", "--out", "/tmp/report"])
    command = nsight.profiler_command(options.tool, options, nsight.workload_command(options))
    return shlex.join(command).replace(f"{sys.executable} {nsight.PROFILING}", "python profiling")


def test_nsys_records_a_generate_call_between_the_profiler_calls():
    assert command_line("nsys", "generate") == (
        "nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node --capture-range=cudaProfilerApi "
        "--capture-range-end=stop --force-overwrite=true --output=/tmp/report "
        "python profiling nsight none generate --device cuda --repeats 5"
    )


def test_ncu_records_the_kernels_inside_an_ops_range():
    arguments = ["ncu", "verify_match sampled", "--model", "llama3-8b", "--nodes", "64"]
    assert command_line(*arguments) == (
        "ncu --set=full --import-source=yes --profile-from-start=off --nvtx "
        "--nvtx-include=specdec@verify_match/ --launch-count=20 --force-overwrite "
        "--export=/tmp/report python profiling nsight none 'verify_match sampled' --model llama3-8b "
        "--nodes 64 --device cuda --repeats 5"
    )


def test_ncu_shows_the_phases_of_a_draft_one_by_one(monkeypatch, capsys):
    """Each phase is one launch, listed in order: three new elements, then the levels of a chain of 5."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    arguments = ["ncu", "draft_head phases", "--model", "llama3-8b", "--launches", "41"]
    assert nsight.main(arguments) == 2
    command, count, *passes, _ = capsys.readouterr().out.splitlines()
    assert "--nvtx-include=specdec@draft_head/ --launch-count=41" in command
    assert count.startswith("41 kernels") and passes == [
        "level 0 new: fc projections rotate",
        "level 0 kept: attend output gate_up down logits grow",
        *(
            f"level {level} frontier: projections rotate attend output gate_up down logits grow"
            for level in range(1, 5)
        ),
    ]


@pytest.mark.parametrize("phase", nsight.PHASES)
def test_ncu_records_one_phase_of_a_generate_call(phase):
    text = command_line("ncu", "generate", "--phase", phase, "--launches", "3")
    assert f"--nvtx-include=specdec@{phase}/ --launch-count=3" in text


@pytest.mark.parametrize("tool, needs", [("nsys", "Nsight Systems"), ("ncu", "Nsight Compute")])
def test_without_the_tool_it_prints_the_command_and_what_it_needs(tool, needs, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert nsight.main([tool, "kv_compact"]) == 2
    command, reason = capsys.readouterr().out.splitlines()
    assert command.startswith(f"{tool} ") and "build/profiles" in command
    assert reason.startswith(f"not run: needs {needs}")


def test_a_tool_that_fails_fails_the_script(tmp_path, monkeypatch, capsys):
    fake = tmp_path / "ncu"
    fake.write_text("#!/bin/sh\nexit 7\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nsight.main(["ncu", "kv_compact", "--out", str(tmp_path / "out" / "report")]) == 7
    assert "ncu --import" in capsys.readouterr().out


@pytest.mark.parametrize("work", ["tree_mask", "draft_head", "draft_head phases", "generate"])
def test_the_work_runs_without_a_profiler(work):
    assert nsight.main(["none", work, "--device", "cpu", "--repeats", "1"]) == 0


def test_unknown_work_lists_what_there_is():
    with pytest.raises(SystemExit, match="there are: generate; 'tree_mask' llama3-8b, 64 nodes"):
        nsight.main(["nsys", "matmul"])
    with pytest.raises(SystemExit, match="'kv_compact' llama3-8b, 64 nodes"):
        nsight.main(["nsys", "kv_compact", "--nodes", "3"])
