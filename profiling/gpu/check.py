"""Run all checks and benchmarks that need a GPU, in less than twelve minutes: ``make gpu-check``.

    python3 profiling gpu-check               # writes profiling/results/gpu_check_<card>.json and .md
    python3 profiling gpu-check --dry-run     # without a GPU: prints the plan

Builds for the card at hand and runs the ops' CUDA tests; ``generate`` with every kind of drafter against
``drafter=None`` and ``model.generate``; 250 bitwise repeats of every op, and the replay of its CUDA graph
with other inputs; compute-sanitizer, which first must find the bugs planted in planted_bugs.cu; and the
benchmarks, the last one a whole model of the size of Llama-3.1-8B against Hugging Face. The report ends with
a table of the cases of ``generate``, to be pasted into an issue.

Needs an NVIDIA GPU; for the python3 that runs it, a CUDA build of torch >= 2.10, NumPy, setuptools, ninja,
pytest, safetensors, transformers, nvtx, triton and CuPy; in PATH, nvcc and compute-sanitizer. Nothing is
installed. A missing requirement is exit status 2. No step is skipped: a step that can't run has failed, and
one failed step is exit status 1. Checks run together; the build and benchmarks run alone. A step that exceeds
its time budget is stopped and fails, and so do the steps that need it. The report has a line per step; a
failed step's last output is in the JSON.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from xml.etree.ElementTree import ParseError

from text_table import format_markdown, format_table

from gpu.generate_cases import case_names, verdict_table, verdicts
from gpu.steps import BUILD, GENERATE, RESULTS, ROOT, Failed, Step, plan, read_last_line

MODULES = (
    "numpy", "nvtx", "setuptools", "ninja", "pytest", "safetensors", "transformers", "cupy",
    "triton",
)  # fmt: skip
PROGRAMS = ("nvcc", "c++", "compute-sanitizer", "sha256sum")
LIMIT = 720  # seconds
TAIL = 4000  # last characters of a failed step's output that the report keeps


@dataclass
class Result:
    step: str
    passed: bool
    seconds: float
    budget: int
    summary: str
    command: str
    output: str  # the end of the output, if the step failed
    verdicts: dict[str, str] = field(default_factory=dict)  # of the cases of ``generate``


def portable(text: str) -> str:
    """Replace paths of this machine, because reports are committed."""
    return text.replace(f"{ROOT}/", "").replace(sys.executable, "python3")


def together(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield the steps in their order, as lists of those that run at the same time."""
    for alone, group in groupby(steps, lambda step: step.alone):
        found = list(group)
        yield from [[step] for step in found] if alone else [found]


def longest(steps: Sequence[Step]) -> int:
    """Seconds that these steps take at most."""
    return sum(max(step.seconds for step in group) for group in together(steps))


def run_step(step: Step, results: list[Result]) -> Result:
    """Run a step, unless the step that it needs has failed."""
    command = portable(shlex.join(step.command))
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
    except (Failed, OSError, ParseError) as error:
        summary, passed = str(error), False
    seconds = time.monotonic() - began
    kept = "" if passed else portable(output[-TAIL:])
    found = verdicts(output)
    return Result(step.name, passed, seconds, step.seconds, summary, command, kept, found)


def run_group(group: list[Step], results: list[Result]) -> list[Result]:
    """Run steps at the same time; none of them needs another one of them."""
    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(lambda step: run_step(step, results), group))


def explain(step: Step, done: subprocess.CompletedProcess[str]) -> str:
    """Why a command failed: the problem that its reader finds, or else the exit status."""
    try:
        step.read(done.stdout)
    except (Failed, OSError, ParseError) as error:
        return str(error)
    return f"exit status {done.returncode}: {read_last_line(done.stdout)}"


def missing_parts() -> list[str]:
    """The requirements that this machine does not meet."""
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


def report_markdown(machine: str, results: list[Result], planned: int) -> str:
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
    generated = {name: verdict for result in results for name, verdict in result.verdicts.items()}
    parts = [
        "# GPU check",
        machine,
        f"{passed} of {planned} steps passed.",
        format_markdown(header, rows),
        *([verdict_table(generated)] if generated else []),
    ]
    return "\n\n".join(parts) + "\n"


def write_report(stem: Path, machine: str, results: list[Result], planned: int) -> None:
    """Write the report; called after every step, so that an interrupted run leaves its results."""
    passed = len(results) == planned and all(result.passed for result in results)
    values = {"machine": machine, "passed": passed, "steps": [asdict(each) for each in results]}
    stem.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")
    stem.with_suffix(".md").write_text(report_markdown(machine, results, planned))


def show_plan(steps: list[Step]) -> None:
    rows = [[step.name, str(step.seconds), step.needs or ""] for step in steps]
    print(format_table(["step", "seconds", "needs"], rows, left=("step", "needs")))
    for step in steps:
        settings = "".join(f"{key}={value} " for key, value in step.environment.items())
        print(f"\n{step.name}:\n  {settings}{portable(shlex.join(step.command))}")
        if step.name.startswith(GENERATE):
            print("  cases:", *case_names([step.name.removeprefix(GENERATE)]), sep="\n    ")
    print(
        f"\nat most {longest(steps)} s of {LIMIT} s; writes profiling/results/gpu_check_<card>.json and .md"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    if parser.parse_args(arguments).dry_run:
        show_plan(plan("<card>", "<capability>"))
        return 0
    if missing := missing_parts():
        print("make gpu-check can't run here. Missing:", *missing, sep="\n  ")
        print("`python3 profiling gpu-check --dry-run` prints what it would do.")
        return 2
    import torch

    from specdec_ext.evaluate.machine import machine_line

    name = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    machine = machine_line(torch.device("cuda"), f"CUDA {torch.version.cuda}")
    print(machine)
    BUILD.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    steps = plan(card_slug(name), f"{major}.{minor}")
    for group in together(steps):
        print(f"{', '.join(step.name for step in group)} ...", flush=True)
        results += run_group(group, results)
        for result in results[-len(group) :]:
            verdict = "pass" if result.passed else "FAIL"
            print(f"{result.step}: {verdict}, {result.seconds:.0f} s: {result.summary}")
            if not result.passed:
                print(result.output)
        write_report(RESULTS / f"gpu_check_{card_slug(name)}", machine, results, len(steps))
    print(report_markdown(machine, results, len(steps)))
    return 0 if all(result.passed for result in results) else 1
