"""Our CPU decoder beside other programs: time to the first token, decoding, batches and whole calls.

    python profiling peers --prepare                                 # installs and exports, measures nothing
    python profiling peers --out profiling/results/peers/cpu         # idle machine
    python profiling peers --models bundled,135m --precisions f32,bf16 --cases ttft --peers openvino

The first run installs each peer into a virtual environment of its own below --work, with pip, and writes the
models in its format there; later runs find both. A peer that can't be installed or can't run is reported, and
the others go on. Every contestant (program, precision, way to generate) is a process that is stopped while
another one is measured. All get the same ids, make the same number of tokens greedily, and take turns; the
first round only warms up. Contestants that do not fit in memory together race in groups, in the order of
--precisions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from bench.runner import Results, Row, parse, table_parser
from bench.stopwatch import Stopwatch

from peers import results
from peers.cases import CASES, Work
from peers.contestants import PRECISIONS, Contestant, Failures, Workshop, contestants
from peers.environments import python_of
from peers.models import BUNDLED, MODELS, Prompts, checkpoint, prompts_of, weights_of_a_step
from peers.process import Process, busy_seconds
from peers.programs import OWN, PLAIN, PROGRAMS
from specdec_ext.evaluate.machine import machine_line
from specdec_ext.evaluate.measuring import take_turns

EACH = 1e9  # bytes of memory for the code, caches and activations of a contestant


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    failures = Failures()
    checkpoints = {model: checkpoint(model, options.work / "models") for model in options.models}
    workshop = equipped(options, failures)
    files = {
        model: exported(workshop, folder, options.precisions, failures)
        for model, folder in checkpoints.items()
    }
    if not options.prepare:
        records: list[Row] = []
        versions = dict[str, None]()  # a set in order
        for model, folder in checkpoints.items():
            weights = weights_of_a_step(folder)
            for group in groups([*files[model]], weights):
                with ExitStack() as stack:
                    racing: dict[Contestant, Process] = {}
                    for each in group:
                        with failures.noting(f"{each.title}, {model}"):
                            process, version = workshop.start(each, files[model][each])
                            racing[each] = stack.enter_context(closing(process))
                            versions[version] = None
                    race = Race(model, weights, racing, failures)
                    records += race.run(options.cases, options.repeats)
        publish(options, records, [*versions], failures)
    return 1 if failures else 0


def equipped(options: argparse.Namespace, failures: Failures) -> Workshop:
    """The workshop with an environment for every program that can be installed."""
    pythons: dict[str, Path] = {}
    for program in (*OWN, *options.peers):
        with failures.noting(PROGRAMS[program].title):
            pythons[program] = python_of(program, PROGRAMS[program], options.work / "environments")
    return Workshop(options.work, pythons, torch.get_num_threads())


def exported(
    workshop: Workshop, folder: Path, precisions: Sequence[str], failures: Failures
) -> dict[Contestant, Path]:
    """The contestants that can take part with the model of a folder, and their files of it."""
    files: dict[Contestant, Path] = {}
    for each in contestants(folder.name, workshop.pythons, precisions):
        with failures.noting(f"{each.title}, {folder.name}"):
            files[each] = workshop.files(each, folder)
    return files


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    given = table_parser(__doc__, 3, "rounds")
    peers = [name for name in PROGRAMS if name not in OWN]
    for name, known, default, text in (
        ("models", MODELS, MODELS[:3], "which models; the number is that of the parameters"),
        ("precisions", PRECISIONS, PRECISIONS, "which weights, where a program has them"),
        ("cases", (*CASES,), (*CASES,), "what is measured"),
        ("peers", peers, peers, "which programs beside ours and Hugging Face"),
    ):
        given.add_argument(
            f"--{name}",
            type=partial(_names, known),
            default=[*default],
            metavar="A,B",
            help=f"{text}: {', '.join(known)} (default {','.join(default)})",
        )
    given.add_argument(
        "--work",
        type=Path,
        default=Path("build/peers"),
        help="folder of environments, models and logs, several GB (default build/peers)",
    )
    given.add_argument("--prepare", action="store_true", help="install and export only")
    options = parse(given, arguments)
    if options.repeats < 1:
        given.error(f"--repeats {options.repeats}: expected at least 1 round")
    if not sys.platform.startswith("linux"):
        given.error("processes and their CPU time are read as on Linux; run this there")
    options.work = options.work.resolve()
    return options


def _names(known: Sequence[str], text: str) -> list[str]:
    """Names between commas; none for an empty text."""
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def groups(every: Sequence[Contestant], weights: int) -> list[list[Contestant]]:
    """Contestants in their order, as many together as fit in memory: a machine that swaps measures nothing.

    Args:
        weights: number of weights of the model.
    """
    free = free_memory()
    found: list[list[Contestant]] = []
    left = 0.0
    for each in every:
        need = weights * each.format.bytes + EACH
        if need > left:
            found.append([])
            left = free
        found[-1].append(each)
        left -= need
    return found


def free_memory() -> int:
    """Bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


class Race:
    """Contestants that have read one model.

    Args:
        model: its name.
        weights: number of weights that a step of decoding reads.
        racing: contestant -> its process.
        failures: where a failing call is noted; the contestant leaves that kind of call.
    """

    def __init__(
        self, model: str, weights: int, racing: Mapping[Contestant, Process], failures: Failures
    ):
        self._model, self._weights = model, weights
        self._racing, self._failures = racing, failures

    def run(self, cases: Sequence[str], rounds: int) -> list[Row]:
        """A record for each contestant and kind of call, for :func:`results.rows_of`."""
        chosen = [CASES[name] for name in cases]
        works = {
            work: case
            for case in chosen
            if self._model == BUNDLED or not case.of_text
            for work in case.works
        }
        prompts = {
            work: prompts_of(self._model, work.rows, work.prompt, case.prompts)
            for work, case in works.items()
        }
        records = {
            (each, work): self._record(each, work, len(prompts[work]))
            for each in self._racing
            for work in works
            if each.takes(work.rows)
        }
        stopwatch = Stopwatch(torch.device("cpu"))
        bandwidths = []
        for turn in range(1 + rounds):
            print(f"{self._model}: {f'round {turn}' if turn else 'warm-up'} ...", file=sys.stderr)
            bandwidths.append(stopwatch.bandwidth()["read_gb_per_s"])
            for work in works:
                for number, batch in enumerate(prompts[work]):
                    self._take_turns(records, work, number, batch, turn)
        for record in records.values():
            # The first call of each prompt warmed up.
            record["seconds"] = [seconds[1:] for seconds in record["seconds"]]
            record["read_gb_per_s"] = max(bandwidths)
        return [*records.values()]

    def _record(self, each: Contestant, work: Work, prompts: int) -> Row:
        return {
            "run": f"{self._model}, {each.title}, {work}",
            "model": self._model,
            "contestant": each.title,
            "work": asdict(work),
            "seconds": [[] for _ in range(prompts)],
            "texts": [[] for _ in range(prompts)],
            "others": [0.0, 0.0],
            # With drafts, a token is not a reading of the weights.
            "weight_bytes": self._weights * each.format.bytes if each.way == PLAIN else None,
        }

    def _take_turns(
        self,
        records: dict[tuple[Contestant, Work], Row],
        work: Work,
        number: int,
        batch: Prompts,
        turn: int,
    ) -> None:
        """One call of every contestant with a batch of prompts; another one begins in every turn."""

        def call(each: Contestant) -> None:
            with self._failures.noting(f"{each.title}, {self._model}, {work}"):
                _enter(records[each, work], number, self._racing[each], batch)
                return
            del records[each, work]

        calls = {each.title: partial(call, each) for each, its in records if its == work}
        take_turns(calls, 1, lambda _, call: call(), first=turn)


def _enter(record: Row, number: int, process: Process, batch: Prompts) -> None:
    """Make the call of a record with its batch of prompts number ``number``, and enter the result."""
    own, busy, began = process.cpu_seconds(), busy_seconds(), time.perf_counter()
    answer = process.ask("generate", prompts=batch, count=record["work"]["new"])
    capacity = (time.perf_counter() - began) * (os.cpu_count() or 1)
    others = busy_seconds() - busy - (process.cpu_seconds() - own)
    record["seconds"][number].append(answer["seconds"])
    record["others"][0] += max(0.0, others)
    record["others"][1] += capacity
    record["texts"][number] = [
        hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16] for text in answer["tokens"]
    ]


def publish(
    options: argparse.Namespace, records: list[Row], versions: list[str], failures: Failures
) -> None:
    """Print the table, and write OUT.json, OUT.md and OUT.png; ``--add`` keeps other records of OUT.json."""
    file = options.out and options.out.with_suffix(".json")
    if options.add and file and file.exists():
        measured = {record["run"] for record in records}
        kept = json.loads(file.read_text())["records"]
        records = [record for record in kept if record["run"] not in measured] + records
        records.sort(key=lambda record: MODELS.index(record["model"]))
    machine = machine_line(torch.device("cpu"), *versions)
    picture = options.out and options.out.with_suffix(".png")
    notes = [
        *results.NOTES,
        *([f"![the table as bars]({picture.name})", ""] if picture else []),
        *(f"- Left out: {name}: {' '.join(why.split())}" for name, why in failures.items()),
    ]
    rows = results.rows_of(records)
    title, settings = "CPU decoders side by side", {"rounds": options.repeats}
    Results(title, machine, results.COLUMNS, results.KEY, rows, settings, notes, records).publish(
        options.out
    )
    if picture:
        results.draw(rows, picture)
