"""Programs for ``profiling peers`` that answer at once, and whose processes need no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from peers.programs.base import PLAIN, Format, Program


class Counting(Program):
    """It counts up from the last id of a prompt. What it prints must not disturb its answers."""

    title = "counting"
    package = "pip"
    requirements: ClassVar[tuple[str, ...]] = ("nothing",)
    formats: ClassVar = {"f32": Format("whole", 4), "int8": Format("bytes", 1)}
    ways: ClassVar = {PLAIN: True, "lookup": False}

    @staticmethod
    def export(model: Path, out: Path, format: str) -> None:
        out.mkdir()
        (out / "format").write_text(format)

    def __init__(self, files: Path, format: str, way: str, threads: int):
        assert (files / "format").read_text() == format

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        print("counting ...")
        return [[prompt[-1] + 1 + step for step in range(count)] for prompt in prompts]


class Short(Counting):
    """It forgets the last token of a text, unless there is only one."""

    title = "short"

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        texts = super().generate(prompts, count)
        return [text[: max(1, count - 1)] for text in texts]


class Dying(Counting):
    title = "dying"

    def __init__(self, files: Path, format: str, way: str, threads: int):
        raise SystemExit("no such instruction")
