"""``Contestant``: a program, a precision and a way to generate; its files and its process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from peers.models import BUNDLED
from peers.process import Failed, Process
from peers.programs import PLAIN, PROGRAMS, Format, Program
from peers.storage import built

# int4 has groups of 32 weights that share a scale, int4-64 groups of 64.
PRECISIONS = ("f32", "bf16", "int8", "int4", "int4-64")


@dataclass(frozen=True)
class Contestant:
    program: str
    precision: str
    way: str

    @property
    def kind(self) -> type[Program]:
        return PROGRAMS[self.program]

    @property
    def format(self) -> Format:
        return self.kind.formats[self.precision]

    @property
    def title(self) -> str:
        way = "" if self.way == PLAIN else f", {self.way}"
        return f"{self.kind.title}{way}, {self.format.name}"

    def takes(self, rows: int) -> bool:
        return rows == 1 or self.kind.ways[self.way]


def contestants(model: str, programs: Iterable[str], precisions: Iterable[str]) -> list[Contestant]:
    """Only for the bundled model do they have drafts: the text of random weights says nothing about those."""
    every = [*programs]
    return [
        Contestant(program, precision, way)
        for precision in precisions
        for program in every
        if precision in PROGRAMS[program].formats
        for way in PROGRAMS[program].ways
        if way == PLAIN or model == BUNDLED
    ]


class Failures(dict[str, str]):
    """What takes no part -> why."""

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Go on after :class:`Failed`, and remember it."""
        try:
            yield
        except Failed as failure:
            print(f"left out: {name}: {failure}", file=sys.stderr)
            self[name] = str(failure)


@dataclass(frozen=True)
class Workshop:
    """Where exported files and logs are.

    Attributes:
        place: the folder of all.
        pythons: program -> Python of its environment.
        threads: of every program.
    """

    place: Path
    pythons: dict[str, Path]
    threads: int

    def files(self, each: Contestant, checkpoint: Path) -> Path:
        """The model in the format of a contestant, which is exported if it is not there.

        Raises:
            Failed: if the export fails.
        """
        if not each.kind.requirements:
            return checkpoint
        name = f"{checkpoint.name}-{each.format.name}"

        def export(out: Path) -> None:
            print(f"writing {name} for {each.kind.title} ...", file=sys.stderr)
            with closing(self._process(each, f"export {name}")) as process:
                process.ask("export", model=str(checkpoint), out=str(out), format=each.format.name)

        return built(self.place / "files" / each.program / name, export)

    def start(self, each: Contestant, files: Path) -> tuple[Process, str]:
        """A process that has read the model, and the version of its program.

        Raises:
            Failed: if it can't.
        """
        process = self._process(each, f"{files.name} {each.format.name} {each.way}")
        try:
            answer = process.ask(
                "load",
                files=str(files),
                format=each.format.name,
                way=each.way,
                threads=self.threads,
            )
        except Failed:
            process.close()
            raise
        return process, f"{each.kind.package} {answer['version']}"

    def _process(self, each: Contestant, name: str) -> Process:
        log = self.place / "logs" / f"{each.program} {name}.log".replace(" ", "-")
        return Process(self.pythons[each.program], each.kind, self.threads, log)
