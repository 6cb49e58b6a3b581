"""The GPU check, tested without a GPU.

Tested are its plan, the readers of the steps' output, running and reporting, and the checks of ops on the CPU
with planted faults.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.op_cases import CASES, Case
from gpu import check as gpu_check
from gpu import generate_cases, op_checks
from gpu import steps as gpu_steps
from gpu.steps import Failed, Step
from helpers.places import ROOT

CPU = torch.device("cpu")


# --- the plan ---------------------------------------------------------------------------------------


def test_dry_run_prints_every_step_and_its_command(capsys):
    assert gpu_check.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    for step in gpu_check.plan("<card>", "<capability>"):
        assert f"\n{step.name} " in printed and f"\n{step.name}:\n" in printed
    assert "compute-sanitizer --tool racecheck" in printed
    assert all(f"\n    {name}\n" in printed for name in generate_cases.case_names())
    assert f"{ROOT}/" not in printed.replace(sys.executable, "")


def test_the_plan_fits_twelve_minutes_and_needs_what_comes_before():
    steps = gpu_check.plan("h200", "9.0")
    assert gpu_check.longest(steps) < gpu_check.LIMIT == 12 * 60
    for number, step in enumerate(steps):
        assert step.needs is None or step.needs in [
            each.name for each in steps[:number] if each.alone
        ]
        for word in step.command:
            if word.endswith((".py", ".cu")):
                assert (ROOT / word).exists(), word


def test_every_op_test_file_is_in_the_plan():
    steps = {step.name: step.command for step in gpu_check.plan("h200", "9.0")}
    for path in (ROOT / "python_tests" / "ops").glob("test_ops_*.py"):
        name = "draft head tests" if "draft_head" in path.name else "op tests"
        named = f"python_tests/ops/{path.name}" in steps[name]
        assert named == (path.name not in gpu_steps.CPU_ONLY)


IMPORTS = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "hypothesis", "typer", "rich", "nvtx"):
            raise ImportError(f"{name} is out of reach")

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, "profiling")
import bench.draft_head, pytest
sys.exit(pytest.main(["--collect-only", "-q", "-m", "not emulated", *sys.argv[1:]]))
"""


def test_op_tests_and_scripts_need_neither_transformers_nor_hypothesis():
    (step,) = [step for step in gpu_check.plan("h200", "9.0") if step.name == "op tests"]
    files = [word for word in step.command if word.endswith(".py")]
    command = [sys.executable, "-c", IMPORTS, "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    done = subprocess.run([*command, *files, __file__], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_it_needs(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "PROGRAMS", ("sh", "no-such-compiler"))
    assert gpu_check.main([]) == 2
    printed = capsys.readouterr().out
    assert f"a GPU that torch {torch.__version__} can use" in printed
    assert "no-such-compiler" in printed and "\n  sh\n" not in printed
    assert "--dry-run" in printed


def test_make_gpu_check_uses_the_python_of_the_machine():
    plan = subprocess.run(
        ["make", "--no-print-directory", "-n", "gpu-check", "ARGS=--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert plan.stdout.split() == ["python3", "profiling", "gpu-check", "--dry-run"]


# --- reading ----------------------------------------------------------------------------------------

MEMCHECK = """\
========= COMPUTE-SANITIZER
PASS once tree_mask small, 64 nodes
PASS once kv_compact small, 64 nodes
========= ERROR SUMMARY: 0 errors
"""
OUT_OF_BOUNDS = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at specdec::writes_past_the_end(int *)+0x50
=========     by thread (63,0,0) in block (0,0,0)
=========     Access at 0x7f2a4f600100 is out of bounds
PASS once tree_mask small, 64 nodes
========= ERROR SUMMARY: 1 error
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at specdec::lacks_a_barrier(int *)+0x80
=========     and Read access at specdec::lacks_a_barrier(int *)+0xa0 [256 hazards]
=========
PASS once tree_mask small, 64 nodes
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
DIVERGENCE = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in warp.
=========     at specdec::diverges_at_a_barrier(int *)+0x70
========= ERROR SUMMARY: 16 errors
"""


def test_sanitizer_output_without_findings():
    assert gpu_steps.read_sanitizer(MEMCHECK) == "2 cases, nothing found"
    race = MEMCHECK.replace(
        "ERROR SUMMARY: 0 errors",
        "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    )
    assert gpu_steps.read_sanitizer(race) == "2 cases, nothing found"


@pytest.mark.parametrize(
    "output, message",
    [
        (OUT_OF_BOUNDS, "1 findings, first: Invalid __global__ write of size 4 bytes"),
        (RACE, "1 findings, first: Error: Race reported between Write access at specdec::lacks"),
        (DIVERGENCE, "16 findings, first: Barrier error detected"),
        ("========= Error: Device not supported\n", "0 summaries of compute-sanitizer"),
        (MEMCHECK.replace("PASS once", "skipped"), "no case ran"),
        (MEMCHECK.replace("PASS once kv", "FAIL (CUDA error) once kv"), "1 of 2 cases: FAIL"),
    ],
)
def test_sanitizer_output_with_findings(output, message):
    with pytest.raises(Failed) as failed:
        gpu_steps.read_sanitizer(output)
    assert str(failed.value).startswith(message)


def test_planted_bugs_must_be_found_by_every_tool():
    found = OUT_OF_BOUNDS + RACE + DIVERGENCE
    assert gpu_steps.read_planted(found) == "found by memcheck, racecheck, synccheck"
    with pytest.raises(Failed, match=r"\[1, 1, 0\]; each tool has a bug to find"):
        gpu_steps.read_planted(found.replace("16 errors", "0 errors"))
    with pytest.raises(Failed, match=r"\[\]; each tool has a bug to find"):
        gpu_steps.read_planted("nvcc: command not found")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_planted_bugs_compile(tmp_path):
    command = [
        "nvcc",
        "-arch=sm_90",
        ROOT / "profiling" / "gpu" / "planted_bugs.cu",
        "-o",
        tmp_path / "bugs",
    ]
    subprocess.run(command, check=True)


JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite
name="pytest" errors="0" failures="0" skipped="0" tests="3" time="3.1">
<testcase classname="python_tests.test_ops_tree_mask" name="test_equals[cuda-one]" time="0.1" />
<testcase classname="python_tests.test_ops_tree_mask" name="test_equals[cuda-two]" time="0.1" />
<testcase classname="python_tests.test_golden" name="test_masks[cuda-eagle]" time="0.1" />
</testsuite></testsuites>"""
FILES = ["test_ops_tree_mask.py", "test_golden.py"]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("", "", None),
        (
            'name="test_equals[cuda-two]" time="0.1" />',
            'name="test_equals[cuda-two]"><failure message="a">b</failure></testcase>',
            "1 of 3 tests: failure python_tests.test_ops_tree_mask::test_equals[cuda-two]",
        ),
        (
            'name="test_masks[cuda-eagle]" time="0.1" />',
            'name="test_masks[cuda-eagle]"><skipped message="no golden" /></testcase>',
            "1 of 3 tests: skipped python_tests.test_golden::test_masks[cuda-eagle]",
        ),
        ("test_golden", "test_other", "no test on CUDA passed in test_golden.py"),
    ],
)
def test_pytests_report(tmp_path, old, new, message):
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT.replace(old, new) if old else JUNIT)
    if message is None:
        assert gpu_steps.read_junit(path, FILES) == "3 tests in 2 files"
    else:
        with pytest.raises(Failed) as failed:
            gpu_steps.read_junit(path, FILES)
        assert str(failed.value) == message


def test_a_benchmark_needs_rows_and_every_op():
    table = "H200 | torch\ncopy 4300 GB/s\nop  us\n------\na    1\nb    2\n"
    assert gpu_steps.read_table(table) == "2 cases"
    with pytest.raises(Failed, match="no row was measured"):
        gpu_steps.read_table("H200 | torch\n")
    with pytest.raises(Failed, match="not in this build: linear"):
        gpu_steps.read_table(f"not in this build: linear\n{table}")


def test_reader_of_the_comparison_with_hugging_face():
    lines = [
        "batch 1, prompts 1, target 8b",
        "                         tokens/s        ratio [95 %]  to plain  peak MiB",
        "HF generate                  30.1  1.00x [1.00, 1.00]     0.50x     16000",
        "specdec head, chain 3, auto  90.3  3.00x [2.90, 3.10]     1.50x     16600",
        "                            policy  accepted  emitted  break-even  same text",
        "HF generate",
        "specdec head, chain 3, auto  fixed      3.00     3.00        1.09        1/1",
    ]
    read = gpu_steps.read_ratios("\n".join(lines))
    assert read == "HF generate 1.00x, specdec head, chain 3, auto 3.00x"
    with pytest.raises(Failed, match="no contestants were measured"):
        gpu_steps.read_ratios("\n".join(lines[:3]))


# --- running and reporting --------------------------------------------------------------------------


def sh(text: str, **kwargs) -> Step:
    return Step(
        "step", kwargs.pop("seconds", 20), ["sh", "-c", text], gpu_steps.read_checks, **kwargs
    )


@pytest.mark.parametrize(
    "step, passed, summary",
    [
        (sh("echo PASS a; echo PASS b"), True, "2 cases"),
        (sh("echo PASS a; exit 3"), False, "exit status 3: PASS a"),
        (sh("echo PASS a; echo FAIL b; exit 1"), False, "1 of 2 cases: FAIL b"),
        (sh("echo quiet"), False, "no case ran"),
        (sh("echo PASS a; sleep 20", seconds=1), False, "stopped after its budget of 1 s"),
        (sh("true", needs="build"), False, "needs build"),
        (sh("true", folder=Path("/nowhere")), False, "[Errno 2] No such file or directory"),
    ],
)
def test_running_a_step(step, passed, summary):
    build = gpu_check.Result("build", False, 1.0, 9, "", "", "")
    result = gpu_check.run_step(step, [build])
    assert result.passed == passed
    assert result.summary.startswith(summary)
    if step.seconds == 1:
        assert 1 <= result.seconds < 10 and result.output == "PASS a\n"


def test_golden_cases_that_are_missing_or_changed_fail(tmp_path):
    (golden, *_) = gpu_check.plan("h200", "9.0")
    assert gpu_check.run_step(golden, []).passed
    copy = tmp_path / "golden"
    shutil.copytree(golden.folder, copy)
    (copy / "eagle1_gqa" / "meta.json").write_text("{}")
    (copy / "eagle1_nobias" / "meta.json").unlink()
    changed = gpu_check.run_step(Step("golden", 5, golden.command, golden.read, folder=copy), [])
    assert not changed.passed
    assert "eagle1_gqa/meta.json: FAILED" in changed.output
    assert "eagle1_nobias/meta.json: FAILED open" in changed.output
    absent = Step("golden", 5, golden.command, golden.read, folder=tmp_path / "none")
    assert not gpu_check.run_step(absent, []).passed


def test_the_report_ends_with_the_cases_of_generate():
    steps = {step.name: step for step in gpu_check.plan("h200", "9.0")}
    results, names = [], []
    for dtype in ("float32", "float16"):
        step = steps[gpu_steps.GENERATE + dtype]
        assert step.command[-1] == dtype
        names.append(next(iter(generate_cases.case_names([dtype]))))
        told = Step(step.name, 5, ["echo", f"FAIL (other text) {names[-1]}"], step.read)
        results.append(gpu_check.run_step(told, []))
    text = gpu_check.report_markdown("H200 | torch 2.11", results, planned=2)
    assert "| generate | float32 | bfloat16 | float16 |" in text and "| did not run |" in text
    assert text.endswith("".join(f"- {name}: FAIL (other text)\n" for name in names))


def test_checks_run_together_and_benchmarks_alone():
    groups = [
        [step.name for step in each] for each in gpu_check.together(gpu_check.plan("h200", "9.0"))
    ]
    assert ["build"] in groups and ["benchmark"] in groups
    (checks,) = [each for each in groups if "op tests" in each]
    assert {"generate in float32", "repeats", "racecheck"} < set(checks)


def test_steps_of_a_group_run_at_the_same_time(tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    for fifo in (there, back):
        os.mkfifo(fifo)  # whoever opens it waits until the other has
    first, second = (
        sh(f"echo > {there}; cat {back}; echo PASS"),
        sh(f"cat {there}; echo > {back}; echo PASS"),
    )
    assert all(result.passed for result in gpu_check.run_group([first, second], []))


# --- checks of ops ----------------------------------------------------------------------------------

SMALL = {case.op: case.reduced() for case in CASES if "cpu" in case.devices}


def run_checks(check: str, case: Case) -> int:
    return op_checks.report(op_checks.outcomes(check, CPU, [case]))


@pytest.mark.parametrize("op", SMALL)
@pytest.mark.parametrize("check", ["once", "repeat"])
def test_ops_pass_on_the_cpu(op, check, capsys, monkeypatch):
    monkeypatch.setattr(op_checks, "REPEATS", 5)
    assert run_checks(check, SMALL[op]) == 0
    assert (
        capsys.readouterr().out == f"PASS {check} {op} {SMALL[op].label}, {SMALL[op].nodes} nodes\n"
    )


def test_an_op_that_varies_or_raises_or_is_absent_fails(capsys, monkeypatch):
    case = SMALL["tree_mask"]
    counter = iter(range(1000))
    monkeypatch.setattr(Case, "run", lambda self, arguments: torch.tensor(next(counter) // 7))
    assert run_checks("repeat", case) == 1
    assert "FAIL (run 7 of 250 differs from the first) repeat tree_mask" in capsys.readouterr().out

    def crash(self, arguments):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(Case, "run", crash)
    assert run_checks("once", case) == 1
    assert "FAIL (RuntimeError: CUDA error) once tree_mask" in capsys.readouterr().out
    monkeypatch.setattr(Case, "is_built", False)
    assert run_checks("once", case) == 1
    assert "FAIL (the op is not in this build)" in capsys.readouterr().out


def test_bits_are_compared_not_values():
    def same(a: float, b: float) -> bool:
        return op_checks.same_bits([torch.tensor(a)], [torch.tensor(b)])

    assert same(1.0, 1.0) and same(float("nan"), float("nan"))
    assert not same(0.0, -0.0)
    assert op_checks.same_bits([torch.tensor([True])], [torch.tensor([True])])


def test_a_run_that_is_cut_off_has_not_passed(tmp_path):
    results = [gpu_check.Result("build", True, 61.2, 120, "for 9.0", "setup.py", "")]
    for planned, passed in ((2, False), (1, True)):
        gpu_check.write_report(tmp_path / "report", "H200", results, planned)
        assert json.loads((tmp_path / "report.json").read_text())["passed"] is passed


def test_reports_name_no_place_on_this_machine(tmp_path):
    step = sh(f"echo FAIL {ROOT}/csrc/op.cu; exit 1")
    result = gpu_check.run_step(step, [])
    assert result.output == "FAIL csrc/op.cu\n" and str(ROOT) not in result.command


def test_json_report_is_written(monkeypatch, tmp_path, capsys):
    steps = [Step("one", 5, ["echo", "PASS a"], gpu_steps.read_checks)]
    steps.append(Step("two", 5, ["echo", "FAIL b"], gpu_steps.read_checks))
    monkeypatch.setattr(gpu_check, "missing_parts", list)
    monkeypatch.setattr(gpu_check, "plan", lambda card, capability: steps)
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_check, "BUILD", tmp_path / "build")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert gpu_check.main([]) == 1
    report = json.loads((tmp_path / "gpu_check_test.json").read_text())
    assert not report["passed"] and "NVIDIA Test | torch" in report["machine"]
    assert [step["passed"] for step in report["steps"]] == [True, False]
    assert "1 of 2 steps" in (tmp_path / "gpu_check_test.md").read_text()
    assert "FAIL" in capsys.readouterr().out
