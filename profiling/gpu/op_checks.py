"""Run every op of the benchmark once, 250 times, or in a CUDA graph.

    python profiling op-checks once               # for compute-sanitizer: each case runs once
    python profiling op-checks repeat             # 250 runs must give the same bits
    python profiling op-checks replay             # a replayed graph must give the results of new inputs

Prints one line per case with PASS or FAIL; the exit code is 1 if a case failed or an op is not in the build.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from bench.op_cases import CASES, Case
from torch import Tensor

REPEATS = 250
REPLAYS = 3
CONTIGUOUS = torch.contiguous_format


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether the values have the same bits: NaN equals itself, -0.0 differs from 0.0."""
    as_bytes = [
        [tensor.clone(memory_format=CONTIGUOUS).flatten().view(torch.uint8) for tensor in tensors]
        for tensors in (ours, theirs)
    ]
    return all(torch.equal(a, b) for a, b in zip(*as_bytes, strict=True))


def outcome(case: Case, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The returned tensors of a run, and its arguments, which it may have changed."""
    return [*tensors_in(case.run(arguments)), *tensors_in(arguments)]


def once(case: Case, device: torch.device) -> str | None:
    case.run(case.make(device).arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return None


def repeat(case: Case, device: torch.device) -> str | None:
    """The reason why the case fails, or None."""
    arguments = case.make(device).arguments
    originals = [tensor.clone() for tensor in tensors_in(arguments)]
    first = [tensor.clone() for tensor in outcome(case, arguments)]
    for number in range(1, REPEATS):
        for tensor, original in zip(tensors_in(arguments), originals, strict=True):
            tensor.copy_(original)
        if not same_bits(outcome(case, arguments), first):
            return f"run {number} of {REPEATS} differs from the first"
    return None


def replay(case: Case, device: torch.device) -> str | None:
    """The reason why the case fails, or None."""
    arguments = case.make(device).arguments
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        case.run(arguments)  # the first call may do more, which must not be captured
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outcome(case, arguments)
    for seed in range(1, REPLAYS + 1):
        fresh = case.make(device, seed).arguments
        for tensor, value in zip(tensors_in(arguments), tensors_in(fresh), strict=True):
            tensor.copy_(value)
        graph.replay()
        if not same_bits(captured, outcome(case, fresh)):
            return f"replay with the inputs of seed {seed} differs from a plain call"
    return None


CHECKS: dict[str, Callable[[Case, torch.device], str | None]] = {
    "once": once,
    "repeat": repeat,
    "replay": replay,
}


def outcomes(
    name: str, device: torch.device, cases: list[Case]
) -> Iterator[tuple[str, str | None]]:
    """Yield each case and the reason why it fails, or None."""
    for case in cases:
        why: str | None = "the op is not in this build"
        if case.is_built:
            try:
                why = CHECKS[name](case, device)
            except RuntimeError as error:  # after a CUDA error all later cases fail as well
                why = f"{type(error).__name__}: {error}"
        yield f"{name} {case.op} {case.label}, {case.nodes} nodes", why


class CannotRun(str):
    """Why a case can't run on this machine."""


def report(outcomes: Iterable[tuple[str, str | None]]) -> int:
    """Print one line per case; return the exit code, 1 if a case failed.

    Args:
        outcomes: names of cases, each with the reason why it failed or, as ``CannotRun``, why it can't run.
    """
    failed = False
    for case, why in outcomes:
        if why is None:
            verdict = "PASS"
        elif isinstance(why, CannotRun):
            verdict = f"NONE ({why})"
        else:
            verdict, failed = f"FAIL ({why})", True
        print(verdict, case, flush=True)
    return int(failed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="only the cases of this model")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    cases = [
        case for case in CASES if device.type in case.devices and options.model in (None, case.name)
    ]
    return report(outcomes(options.check, device, cases))
