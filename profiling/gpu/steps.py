"""The steps of the GPU check and the readers of their output. This module needs neither torch nor a GPU."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from gpu.generate_cases import DTYPES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "profiling" / "results"
BUILD = ROOT / "build" / "gpu_check"
GENERATE = "generate in "  # and a dtype: the first words of the steps that run generate
TOGETHER = 150  # seconds of a step that runs beside others; on an H200 all of them took 90
TOOLS = ("memcheck", "racecheck", "synccheck")
OP_TESTS = ROOT / "python_tests" / "ops"
CPU_ONLY = ("test_ops_linear.py",)
DRAFT_HEAD = "test_ops_draft_head*.py"  # need transformers, unlike the other tests of ops


class Failed(Exception):
    """Raised by a reader whose step failed."""


# Turns a step's output into a summary for the table, or raises Failed.
Reader = Callable[[str], str]


@dataclass(frozen=True)
class Step:
    """One command of the check.

    Attributes:
        seconds: time budget, after which the command is stopped.
        read: reader of its output.
        needs: name of the step that must have passed before this one can run.
        alone: nothing else may run meanwhile, because the step measures or takes all processors. Others run
            together with the steps beside them.
    """

    name: str
    seconds: int
    command: list[str]
    read: Reader
    needs: str | None = None
    alone: bool = False
    folder: Path = ROOT
    environment: dict[str, str] = field(default_factory=dict)


def read_checks(output: str) -> str:
    """Read the PASS and FAIL lines of op_checks.py and generate_checks.py."""
    verdicts = Counter(re.findall(r"^(PASS|FAIL)\b", output, re.MULTILINE))
    if verdicts["FAIL"]:
        lines = [line for line in output.splitlines() if line.startswith("FAIL")]
        raise Failed(f"{verdicts['FAIL']} of {verdicts.total()} cases: {lines[0]}")
    if not verdicts["PASS"]:
        raise Failed("no case ran")
    return f"{verdicts['PASS']} cases"


def read_junit(path: Path, test_files: list[str]) -> str:
    """Read pytest's XML report: every file must have run a test, and none may have failed or been skipped."""
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
    """The number of errors or hazards in each of compute-sanitizer's summaries."""
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
    """Every tool must find the bug that was planted for it."""
    findings = sanitizer_findings(output)
    if len(findings) != len(TOOLS) or not all(findings):
        raise Failed(f"findings by {', '.join(TOOLS)}: {findings}; each tool has a bug to find")
    return f"found by {', '.join(TOOLS)}"


def read_last_line(output: str) -> str:
    return output.strip().splitlines()[-1] if output.strip() else ""


def read_table(output: str) -> str:
    """Read the table of a benchmark: a header, a rule, and one row per case."""
    lines = output.splitlines()
    rules = [number for number, line in enumerate(lines) if line and not line.strip("-")]
    rows = len(lines) - rules[0] - 1 if rules else 0
    missing = [line for line in lines if line.startswith("not in this build")]
    if not rows or missing:
        raise Failed(missing[0] if missing else "no row was measured")
    return f"{rows} cases"


def read_ratios(output: str) -> str:
    """Read the first table of ``python profiling generate``: the speeds relative to Hugging Face."""
    ratios = re.findall(r"^ *(.+?) {2,}[\d.]+ +([\d.]+x) \[", output, re.MULTILINE)
    if len(ratios) < 2:
        raise Failed("no contestants were measured")
    return ", ".join(f"{name} {ratio}" for name, ratio in ratios)


def plan(card: str, capability: str) -> list[Step]:
    """All steps for a card such as "h200" with a compute capability such as "9.0"."""
    on_card = {"TORCH_CUDA_ARCH_LIST": capability, "SPECDEC_CUDA": "1"}
    golden = ROOT / "python_tests" / "golden"
    checksums = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    report = tool_command("kernel-report", "--out", str(RESULTS / "kernels" / f"kernels_{card}"))
    bench = tool_command("ops", "--device", "cuda", "--out")
    heads = tool_command("draft-head", "--quick", "--repeats", "20", "--out")
    heads += [str(RESULTS / "draft_head" / f"draft_head_{card}")]
    timed = [*bench, str(RESULTS / "kernels" / f"ops_{card}"), "--cupy"]
    compiled = [*bench, str(RESULTS / "kernels" / f"ops_{card}_compile"), "--compile"]
    compiled += ["--model", "llama3-8b", "--largest"]
    whole = tool_command("generate", "--device", "cuda", "--target", "8b", "--dtype", "bfloat16")
    whole += ["--count", "1", "--repeats", "2", "--max-new-tokens", "64"]
    whole += ["--out", str(RESULTS / "generation" / f"8b_{card}")]
    return [
        Step("golden", 5, checksums, lambda output: "reference cases complete", folder=golden),
        Step(
            "build",
            150,
            build,
            lambda output: f"for {capability}",
            alone=True,
            environment=on_card,
        ),
        Step("kernel report", 120, report, read_last_line, environment=on_card),
        device_tests("op tests", op_test_files()),
        device_tests("draft head tests", draft_head_test_files()),
        *(check(GENERATE + dtype, "generate-checks", "--dtype", dtype) for dtype in DTYPES),
        check("repeats", "op-checks", "repeat"),
        check("graph replay", "op-checks", "replay"),
        planted_bugs(),
        *map(sanitized_ops, TOOLS),
        benchmark("benchmark", 60, timed),
        benchmark("draft head benchmark", 60, heads),
        benchmark("against torch.compile", 60, compiled),
        benchmark("8B against Hugging Face", 120, whole, read_ratios),
    ]


def check(name: str, *arguments: str) -> Step:
    """Step of a tool that prints PASS and FAIL lines."""
    return Step(name, TOGETHER, tool_command(*arguments), read_checks, "build")


def benchmark(name: str, seconds: int, command: list[str], read: Reader = read_table) -> Step:
    return Step(name, seconds, command, read, "build", alone=True)


def tool_command(name: str, *arguments: str) -> list[str]:
    """The command line of a tool of ``python profiling``."""
    return [sys.executable, str(ROOT / "profiling"), name, *arguments]


def draft_head_test_files() -> list[str]:
    """The test files of draft_head: options, reference cases, batches and layouts."""
    return sorted(path.name for path in OP_TESTS.glob(DRAFT_HEAD))


def op_test_files() -> list[str]:
    """The test files of all other ops, and the reference cases."""
    names = sorted(path.name for path in OP_TESTS.glob("test_ops_*.py"))
    others = {*CPU_ONLY, *draft_head_test_files()}
    return [name for name in names if name not in others] + ["test_golden.py"]


def device_tests(name: str, files: list[str]) -> Step:
    """Step that runs the CUDA cases of test files."""
    junit = BUILD / f"{name.replace(' ', '_')}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not emulated", f"--junitxml={junit}"]
    command += ["-n", "4"] if importlib.util.find_spec("xdist") else []
    command += [f"python_tests/ops/{name}" for name in files]
    return Step(name, TOGETHER, command, lambda output: read_junit(junit, files), "build")


def sanitizer(tool: str) -> list[str]:
    return ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=specdec"]


def sanitized_ops(tool: str) -> Step:
    command = [*sanitizer(tool), *tool_command("op-checks", "once", "--model", "small")]
    # Without caching every tensor is its own allocation; otherwise memcheck sees only the ends of torch's
    # pool.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(tool, TOGETHER, command, read_sanitizer, "build", environment=environment)


def planted_bugs() -> Step:
    source, program = Path(__file__).with_name("planted_bugs.cu"), BUILD / "planted_bugs"
    commands = [shlex.join(["nvcc", "-arch=native", str(source), "-o", str(program)])]
    commands += [shlex.join([*sanitizer(tool), str(program), tool]) for tool in TOOLS]
    # Exit codes of the program and the tools are ignored; only the findings matter.
    return Step(
        "planted bugs", TOGETHER, ["sh", "-c", "; ".join([*commands, "true"])], read_planted
    )
