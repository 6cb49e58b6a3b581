"""``Program``: what the race asks of a program that generates text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

PLAIN = "plain"


@dataclass(frozen=True)
class Format:
    """How weights are stored.

    Attributes:
        name: the program's own name for it.
        bytes: per weight, scales included.
    """

    name: str
    bytes: float


class Program(ABC):
    """A program that has read a model and generates greedily, ids in and ids out.

    A subclass imports its packages inside of its methods, because the race reads the class attributes in an
    environment that lacks them.

    Attributes:
        title: its name in tables.
        package: the distribution whose version is reported.
        requirements: what is installed into its environment; a program without runs in this environment.
        unwanted: packages that a requirement brings along and that are removed again.
        formats: precision -> how the program stores weights of it, for all precisions that it has.
        ways: way to generate -> whether it takes batches of more than one row.
    """

    title: ClassVar[str]
    package: ClassVar[str]
    requirements: ClassVar[tuple[str, ...]] = ()
    unwanted: ClassVar[tuple[str, ...]] = ()
    formats: ClassVar[Mapping[str, Format]]
    ways: ClassVar[Mapping[str, bool]] = {PLAIN: True}

    @staticmethod
    def export(model: Path, out: Path, format: str) -> None:
        """Write the model in the program's own files to the new folder ``out``.

        A program without ``requirements`` reads the model's folder itself and is never asked.

        Args:
            model: folder of a Hugging Face checkpoint in bfloat16 with its tokenizer.
            format: name of one of ``formats``.
        """
        raise NotImplementedError

    @abstractmethod
    def __init__(self, files: Path, format: str, way: str, threads: int):
        """Read the model; ``files`` is what ``export`` wrote, or the model's folder."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Exactly ``count`` new tokens of each prompt, whatever ends a text; all prompts have one length."""
