"""Everything that only a GPU can show, in one run of under nine minutes: ``make gpu-check``.

    python3 profiling/gpu_check.py               # writes profiling/results/gpu_check_<card>.json and .md
    python3 profiling/gpu_check.py --dry-run     # anywhere: prints the plan

Needs an NVIDIA GPU and, under the python3 that runs it, a CUDA build of torch >= 2.10, setuptools, ninja,
pybind11, pytest, safetensors, triton and CuPy; in PATH nvcc and compute-sanitizer. No step is skipped: what
is missing fails. A step that takes longer than its budget is stopped and fails, and so do those that need it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from text_table import format_markdown, format_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "profiling" / "results"
BUILD = ROOT / "build" / "gpu_check"
MODULES = ("setuptools", "ninja", "pybind11", "pytest", "safetensors", "cupy", "triton")
PROGRAMS = ("nvcc", "c++", "compute-sanitizer", "sha256sum")
TOOLS = ("memcheck", "racecheck", "synccheck")
CPU_ONLY = ("test_ops_linear.py",)
LIMIT = 540  # seconds
TAIL = 4000  # characters of a failed step's output that the report keeps


class Failed(Exception):
    """A step's own verdict on its output."""


# What a step's output says: a summary for the table, or Failed.
Reader = Callable[[str], str]


@dataclass(frozen=True)
class Step:
    """One command of the check.

    Attributes:
        seconds: budget; beyond it the command is stopped.
        needs: a step without which this one can't run.
    """

    name: str
    seconds: int
    command: list[str]
    read: Reader
    needs: str | None = None
    folder: Path = ROOT
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Result:
    step: str
    passed: bool
    seconds: float
    budget: int
    summary: str
    command: str
    output: str  # the end of it if the step failed


def read_checks(output: str) -> str:
    """The PASS and FAIL lines of op_checks.py."""
    verdicts = Counter(re.findall(r"^(PASS|FAIL)\b", output, re.MULTILINE))
    if verdicts["FAIL"]:
        lines = [line for line in output.splitlines() if line.startswith("FAIL")]
        raise Failed(f"{verdicts['FAIL']} of {verdicts.total()} cases: {lines[0]}")
    if not verdicts["PASS"]:
        raise Failed("no case ran")
    return f"{verdicts['PASS']} cases"


def read_junit(path: Path, test_files: list[str]) -> str:
    """pytest's XML report: every test file ran something, and nothing failed or was skipped."""
    report = ElementTree.parse(path).getroot()
    outcomes: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    problems = []
    for case in report.iter("testcase"):
        verdict = next((child.tag for child in case if child.tag != "system-out"), "passed")
        outcomes[verdict] += 1
        ran[case.get("classname", "").split(".")[-1]] += verdict == "passed"
        if verdict != "passed":
            problems.append(f"{verdict} {case.get('classname')}::{case.get('name')}")
    silent = [name for name in test_files if not ran[Path(name).stem]]
    if problems:
        raise Failed(f"{len(problems)} of {outcomes.total()} tests: {problems[0]}")
    if silent:
        raise Failed(f"no test on CUDA passed in {', '.join(silent)}")
    return f"{outcomes['passed']} tests in {len(test_files)} files"


def sanitizer_findings(output: str) -> list[int]:
    """How many errors or hazards each of compute-sanitizer's summaries counts."""
    summary = r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)"
    return [int(count) for count in re.findall(summary, output, re.MULTILINE)]


def read_sanitizer(output: str) -> str:
    findings = sanitizer_findings(output)
    if len(findings) != 1:
        raise Failed(f"{len(findings)} summaries of compute-sanitizer instead of one")
    if findings[0]:
        first = re.search(r"^=+ ((?:Invalid|Error|Race|Barrier|Program).*)$", output, re.MULTILINE)
        raise Failed(f"{findings[0]} findings" + (f", first: {first[1]}" if first else ""))
    return f"{read_checks(output)}, nothing found"


def read_planted(output: str) -> str:
    """Every tool must find the bug made for it."""
    findings = sanitizer_findings(output)
    if len(findings) != len(TOOLS) or not all(findings):
        raise Failed(f"findings by {', '.join(TOOLS)}: {findings}; each has a bug to find")
    return f"found by {', '.join(TOOLS)}"


def read_last_line(output: str) -> str:
    return output.strip().splitlines()[-1] if output.strip() else ""


def read_table(output: str) -> str:
    """bench_ops.py's table: a header, a rule, a row per case."""
    lines = output.splitlines()
    rules = [number for number, line in enumerate(lines) if line and not line.strip("-")]
    rows = len(lines) - rules[0] - 1 if rules else 0
    missing = [line for line in lines if line.startswith("not in this build")]
    if not rows or missing:
        raise Failed(missing[0] if missing else "no row was measured")
    return f"{rows} cases"


def plan(card: str, capability: str) -> list[Step]:
    """All steps for a card, "h200", of a compute capability, "9.0"."""
    on_card = {"TORCH_CUDA_ARCH_LIST": capability, "SPECDEC_CUDA": "1"}
    golden = ROOT / "python_tests" / "golden"
    checksums = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    report = script("kernel_report.py", "--out", str(RESULTS / f"kernels_{card}"))
    bench = script("bench_ops.py", "--device", "cuda", "--out")
    timed = [*bench, str(RESULTS / f"ops_{card}"), "--cupy"]
    compiled = [*bench, str(RESULTS / f"ops_{card}_compile"), "--compile"]
    compiled += ["--model", "llama3-8b", "--largest"]
    return [
        Step("golden", 5, checksums, lambda output: "reference cases complete", folder=golden),
        Step("build", 120, build, lambda output: f"for {capability}", environment=on_card),
        Step("kernel report", 30, report, read_last_line, environment=on_card),
        op_tests(120),
        Step("repeats", 25, script("op_checks.py", "repeat"), read_checks, "build"),
        Step("graph replay", 20, script("op_checks.py", "replay"), read_checks, "build"),
        planted_bugs(15),
        *(sanitized_ops(tool, 25) for tool in TOOLS),
        Step("benchmark", 50, timed, read_table, "build"),
        Step("against torch.compile", 70, compiled, read_table, "build"),
    ]


def script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "profiling" / name), *arguments]


def op_tests(seconds: int) -> Step:
    """The CUDA cases of every op's test file and of the reference cases."""
    paths = sorted((ROOT / "python_tests").glob("test_ops_*.py"))
    files = [path.name for path in paths if path.name not in CPU_ONLY] + ["test_golden.py"]
    junit = BUILD / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not emulated", f"--junitxml={junit}"]
    command += [f"python_tests/{name}" for name in files]
    return Step("op tests", seconds, command, lambda output: read_junit(junit, files), "build")


def sanitizer(tool: str) -> list[str]:
    return ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=specdec"]


def sanitized_ops(tool: str, seconds: int) -> Step:
    command = [*sanitizer(tool), *script("op_checks.py", "once", "--model", "small")]
    # Every tensor is an allocation of its own, or memcheck would see the ends of torch's pool only.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(tool, seconds, command, read_sanitizer, "build", environment=environment)


def planted_bugs(seconds: int) -> Step:
    source, program = ROOT / "profiling" / "planted_bugs.cu", BUILD / "planted_bugs"
    commands = [shlex.join(["nvcc", "-arch=native", str(source), "-o", str(program)])]
    commands += [shlex.join([*sanitizer(tool), str(program), tool]) for tool in TOOLS]
    # The program and the tools exit as they like: the findings count.
    return Step("planted bugs", seconds, ["sh", "-c", "; ".join([*commands, "true"])], read_planted)


def run_step(step: Step, results: list[Result]) -> Result:
    """Run one step unless one that it needs has failed."""
    command = shlex.join(step.command)
    if any(result.step == step.needs and not result.passed for result in results):
        return Result(step.name, False, 0.0, step.seconds, f"needs {step.needs}", command, "")
    began = time.monotonic()
    output = ""
    try:
        done = subprocess.run(
            step.command,
            cwd=step.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **step.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=step.seconds,
        )
        output = done.stdout
        summary = step.read(output) if done.returncode == 0 else explain(step, done)
        passed = done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        summary, passed = f"stopped after its budget of {step.seconds} s", False
    except (Failed, OSError, ElementTree.ParseError) as error:
        summary, passed = str(error), False
    seconds = time.monotonic() - began
    kept = "" if passed else output[-TAIL:]
    return Result(step.name, passed, seconds, step.seconds, summary, command, kept)


def explain(step: Step, done: subprocess.CompletedProcess[str]) -> str:
    """Why a command that failed did: what its reader finds, or the exit status."""
    try:
        step.read(done.stdout)
    except (Failed, OSError, ElementTree.ParseError) as error:
        return str(error)
    return f"exit status {done.returncode}: {read_last_line(done.stdout)}"


def missing_parts() -> list[str]:
    """What the check needs and this machine lacks."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [f"python module {name}" for name in MODULES if not importlib.util.find_spec(name)]
    if importlib.util.find_spec("torch") is None:
        return [*missing, "python module torch, a CUDA build"]
    import torch

    if not torch.cuda.is_available():
        missing.insert(0, f"a GPU that torch {torch.__version__} can use")
    return missing


def card_slug(name: str) -> str:
    """``NVIDIA H100 80GB HBM3`` -> ``h100_80gb_hbm3``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia")).strip("_")


def report_markdown(machine: str, results: list[Result]) -> str:
    total = sum(result.seconds for result in results)
    header = ["step", "", "seconds", "budget", "summary"]
    rows = [
        [
            result.step,
            "pass" if result.passed else "FAIL",
            f"{result.seconds:.0f}",
            str(result.budget),
            result.summary,
        ]
        for result in results
    ]
    passed = sum(result.passed for result in results)
    return (
        f"# GPU check\n\n{machine}\n\n{passed} of {len(results)} steps passed in {total:.0f} s.\n\n"
        f"{format_markdown(header, rows)}\n"
    )


def show_plan(steps: list[Step]) -> None:
    rows = [[step.name, str(step.seconds), step.needs or ""] for step in steps]
    print(format_table(["step", "seconds", "needs"], rows, left=("step", "needs")))
    for step in steps:
        settings = "".join(f"{key}={value} " for key, value in step.environment.items())
        print(f"\n{step.name}:\n  {settings}{shlex.join(step.command)}".replace(f"{ROOT}/", ""))
    total = sum(step.seconds for step in steps)
    print(
        f"\nat most {total} s of {LIMIT} s; writes profiling/results/gpu_check_<card>.json and .md"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    if parser.parse_args(arguments).dry_run:
        show_plan(plan("<card>", "<capability>"))
        return 0
    if missing := missing_parts():
        print("make gpu-check can't run here. Missing:", *missing, sep="\n  ")
        print("`python3 profiling/gpu_check.py --dry-run` prints what it would do.")
        return 2
    import torch

    sys.path.insert(0, str(ROOT))
    from specdec_ext.machine import machine_line

    name = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    machine = machine_line(torch.device("cuda"), f"CUDA {torch.version.cuda}")
    print(machine)
    BUILD.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for step in plan(card_slug(name), f"{major}.{minor}"):
        print(f"{step.name} ...", end=" ", flush=True)
        result = run_step(step, results)
        results.append(result)
        print(f"{'pass' if result.passed else 'FAIL'}, {result.seconds:.0f} s: {result.summary}")
        if not result.passed:
            print(result.output)
    passed = all(result.passed for result in results)
    stem = RESULTS / f"gpu_check_{card_slug(name)}"
    values = {"machine": machine, "passed": passed, "steps": [asdict(each) for each in results]}
    stem.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")
    stem.with_suffix(".md").write_text(report_markdown(machine, results))
    print(report_markdown(machine, results))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
