"""Profile an op or a call of generate with Nsight Systems or Nsight Compute.

    python profiling nsight nsys generate                     # timeline of a call with phases and ops
    python profiling nsight ncu generate --phase verify       # the kernels of one phase
    python profiling nsight ncu "verify_match sampled" --model llama3-8b --nodes 64
    python profiling nsight ncu "draft_head phases" --launches 41     # a draft phase by phase
    python profiling nsight none kv_compact --device cpu      # the same work without a profiler

Prints the command and runs it; the exit code is 2 if the tool is not installed. The profiled calls run
after a warm-up, between cudaProfilerStart and cudaProfilerStop. Reports are written below build/profiles;
profiling/gpu/nsight.md explains how to read them.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from baselines.draft_calls import NEW
from bench.op_cases import CASES, Case, draft_config, draft_tree
from cuda_kernels.draft_schedule import phases

PROFILING = Path(__file__).resolve().parent.parent
PHASES = ("prefill", "draft", "verify", "commit")
NEEDS = {
    "nsys": "Nsight Systems (nsys in PATH)",
    "ncu": "Nsight Compute (ncu in PATH; part of the CUDA toolkit)",
}
SHOWN = {
    "nsys": "nsys stats --report nvtx_gpu_proj_sum,cuda_gpu_kern_sum,cuda_api_sum {out}.nsys-rep",
    "ncu": "ncu --import {out}.ncu-rep --page details",
}


def chosen_case(options: argparse.Namespace) -> Case:
    """The first case that fits the options.

    Raises:
        SystemExit: if no case fits; the message lists all cases.
    """
    cases = [case for case in CASES if options.work in (case.op, case.function)]
    for case in cases:
        if options.model in (None, case.name) and options.nodes in (None, case.nodes):
            return case
    known = cases or CASES
    names = dict.fromkeys(f"{case.op!r} {case.label}, {case.nodes} nodes" for case in known)
    sys.exit(f"no case fits; there are: generate; {'; '.join(names)}")


def profiler_command(tool: str, options: argparse.Namespace, workload: list[str]) -> list[str]:
    """The command line that runs ``workload`` under ``tool``."""
    out = str(options.out)
    if tool == "none":
        return workload
    if tool == "nsys":
        return [
            "nsys", "profile", "--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node",
            "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
            "--force-overwrite=true", f"--output={out}", *workload,
        ]  # fmt: skip
    inside = options.phase if options.work == "generate" else chosen_case(options).function
    return [
        "ncu", "--set=full", "--import-source=yes", "--profile-from-start=off",
        "--nvtx", f"--nvtx-include=specdec@{inside}/", f"--launch-count={options.launches}",
        "--force-overwrite", f"--export={out}", *workload,
    ]  # fmt: skip


def workload_command(options: argparse.Namespace) -> list[str]:
    """The command of the profiled process: this tool without a profiler."""
    command = [sys.executable, str(PROFILING), "nsight", "none", options.work]
    for name in ("model", "nodes", "device", "repeats"):
        value = getattr(options, name)
        command += [] if value is None else [f"--{name}", str(value)]
    return command


def phase_names(case: Case) -> str:
    """The kernels of one draft in order, pass by pass, when every phase is its own launch."""
    order = phases(draft_config(case.name), draft_tree(case), NEW * case.batch, case.batch)
    passes = groupby(order, lambda phase: (phase.kind, phase.level, phase.first_row))
    named = [
        f"level {level} {kind}: {' '.join(p.op for p in of)}" for (kind, level, _), of in passes
    ]
    return "\n".join([f"{len(order)} kernels per draft, in this order:", *named])


def op_work(options: argparse.Namespace) -> Callable[[], Any]:
    case = chosen_case(options)
    if not case.is_built:
        sys.exit(f"{case.function} is not in this build of specdec_ext; rebuild it")
    arguments = case.make(torch.device(options.device)).arguments
    return lambda: case.run(arguments)


def generate_work(options: argparse.Namespace) -> Callable[[], Any]:
    from specdec_ext import assets, generate

    target = assets.load_target(torch.bfloat16).to(options.device)
    prompt = assets.held_out_prompts()[0]["prompt"]
    ids = assets.load_tokenizer()(prompt, return_tensors="pt")["input_ids"].to(options.device)
    return lambda: generate(target, ids, max_new_tokens=32, do_sample=False)


def run_workload(options: argparse.Namespace) -> None:
    work = (generate_work if options.work == "generate" else op_work)(options)
    for _ in range(3):
        work()
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    for _ in range(options.repeats):
        work()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("tool", choices=("nsys", "ncu", "none"))
    parser.add_argument(
        "work", metavar="op|generate", help="generate, or an op as in the table of ops"
    )
    parser.add_argument("--model", help="model of the op's case")
    parser.add_argument("--nodes", type=int, help="number of nodes of the op's case")
    parser.add_argument(
        "--phase", choices=PHASES, default="verify", help="phase to profile with ncu generate"
    )
    parser.add_argument(
        "--launches", type=int, default=20, help="maximum number of kernels to profile with ncu"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of profiled calls")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=best)
    parser.add_argument(
        "--out", type=Path, help="report without its suffix; default: build/profiles/TOOL_OP"
    )
    options = parser.parse_args(arguments)
    if options.out is None:
        name = f"{options.tool}_{options.work.replace(' ', '_')}"
        options.out = PROFILING.parent / "build" / "profiles" / name
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.work != "generate":
        chosen_case(options)
    if options.tool == "none":
        run_workload(options)
        return 0
    command = profiler_command(options.tool, options, workload_command(options))
    print(shlex.join(command))
    if options.work == "draft_head phases":
        print(phase_names(chosen_case(options)))
    if shutil.which(options.tool) is None:
        print(f"not run: needs {NEEDS[options.tool]}")
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command)
    print(f"to read it: {SHOWN[options.tool].format(out=options.out)}")
    return done.returncode
