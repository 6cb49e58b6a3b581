"""PTX text as nvcc emits it -> entries with their parameters, shared variables and statements."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

BYTES = {
    f"{kind}{bits}": bits // 8
    for kind, widths in {"b": (8, 16, 32, 64), "f": (16, 32, 64)}.items()
    for bits in widths
} | {f"{kind}{bits}": bits // 8 for kind in "us" for bits in (8, 16, 32, 64)}

Operand = str | tuple[str, ...]  # a tuple for {a, b}, and for the two destinations a|b


class PtxError(Exception):
    """PTX that is not translated; the message begins with file and line."""


@dataclass(frozen=True)
class Place:
    """A position in the kernel's source."""

    file: str
    line: int
    column: int


@dataclass(frozen=True)
class Variable:
    """A parameter or a shared variable.

    Attributes:
        offset: byte in the entry's parameters or static shared memory.
    """

    name: str
    offset: int
    bytes: int
    alignment: int


@dataclass(frozen=True)
class Instruction:
    """An instruction, for example ``@!%p1 add.s32 %r1, %r2, 3``.

    Attributes:
        guard: name of the predicate; None if there is none.
        negated: whether the instruction is executed where the predicate is false.
    """

    line: int
    place: Place | None
    guard: str | None
    negated: bool
    opcode: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Registers:
    """A declaration: one register, or ``count`` registers that are numbered from 0."""

    kind: str
    name: str
    count: int | None


@dataclass(frozen=True)
class Brace:
    """Begins or ends a scope of registers."""

    text: str


Statement = Instruction | Label | Registers | Brace


@dataclass
class Entry:
    """A kernel."""

    name: str
    params: list[Variable]
    statements: list[Statement] = field(default_factory=list)
    shared: list[Variable] = field(default_factory=list)


@dataclass
class Module:
    """A PTX file.

    Attributes:
        dynamic_shared: names of the arrays that are the dynamic shared memory.
    """

    name: str
    dynamic_shared: set[str]
    entries: list[Entry]


_COMMENT = re.compile(
    r'("[^"]*")|//[^\n]*|/\*.*?\*/', re.DOTALL
)  # or a string, which may contain //
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")
_UNKNOWN = re.compile(r"^\s*(?:\.(?:visible|extern|weak)\s+)?\.(func|const|global|local)\b", re.M)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*?inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*([^;]*);", re.DOTALL)
_TOKEN = re.compile(
    r"\s*(?:(?P<location>\.loc\b[^\n]*)|(?P<label>[$\w]+)\s*:(?!:)|(?P<brace>[{}])"
    r"|(?P<statement>[^;{}]*(?:\{[^}]*\}[^;{}]*)*;))"
)
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


def read_module(text: str, name: str) -> Module:
    """Parse PTX; ``name`` is the file's name for messages.

    Raises:
        PtxError: if the text has a construct that kernels of this project do not use.
    """
    text = _COMMENT.sub(lambda each: each[1] or "\n" * each[0].count("\n"), text)
    lines = _Lines(text, name)
    # From csrc on, so that the result does not depend on where the tree is.
    sources = {number: re.sub(r".*/(?=csrc/)", "", path) for number, path in _FILE.findall(text)}
    found = list(_ENTRY.finditer(text))
    ends = [*(each.start() for each in found), len(text)][1:]
    for match in _UNKNOWN.finditer(text):
        raise lines.error(match.start(1), f"the directive .{match[1]} is not translated")
    dynamic = {match[3] for match in re.finditer(r"\.extern\s+" + _SHARED.pattern, text)}
    entries = [Entry(match[1], _lay_out(_PARAM.findall(match[2]))) for match in found]
    for entry, match, end in zip(entries, found, ends, strict=True):
        _Body(entry, lines, sources).read(text, match.end(), end)
    return Module(name, dynamic, entries)


class _Lines:
    """Line numbers of a text."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._begins = [0, *(match.end() for match in re.finditer("\n", text))]

    def number(self, position: int) -> int:
        return bisect_right(self._begins, position)

    def error(self, position: int, problem: str) -> PtxError:
        return PtxError(f"{self._name}:{self.number(position)}: {problem}")


def _lay_out(declared: list[tuple[str, str, str, str]], begin: int = 0) -> list[Variable]:
    """Give each variable the next offset that its alignment allows, as the PTX ABI does."""
    variables = []
    for alignment, kind, name, count in declared:
        element = BYTES[kind]
        align = int(alignment) if alignment else element
        offset = -(-begin // align) * align
        variables.append(Variable(name, offset, element * int(count or 1), align))
        begin = offset + variables[-1].bytes
    return variables


class _Body:
    """Reads the statements of an entry."""

    def __init__(self, entry: Entry, lines: _Lines, sources: dict[str, str]) -> None:
        self._entry, self._lines, self._sources = entry, lines, sources
        self._place: Place | None = None
        self._callers: dict[tuple[str, ...], tuple[str, ...]] = {}

    def read(self, text: str, position: int, end: int) -> None:
        depth = 1
        while depth > 0:
            token = _TOKEN.match(text, position, end)
            if token is None:
                raise self._lines.error(position, f"the entry {self._entry.name} has no end")
            position = token.end()
            if token["location"]:
                self._place = self._find_place(token["location"])
            elif token["label"]:
                self._entry.statements.append(Label(token["label"]))
            elif token["brace"]:
                depth += 1 if token["brace"] == "{" else -1
                if depth > 0:
                    self._entry.statements.append(Brace(token["brace"]))
            else:
                self._entry.statements += self._statement(
                    token["statement"], token.start("statement")
                )

    def _find_place(self, text: str) -> Place | None:
        """The place of an instruction; that of the caller for the wrappers of device instructions."""
        match = _LOCATION.match(text)
        if match is None:
            return None
        place = match.group(1, 2, 3)
        if match[4]:
            self._callers[place] = match.group(4, 5, 6)
        while self._is_wrapper(place[0]) and place in self._callers:
            place = self._callers[place]
        number, line, column = place
        return Place(self._sources.get(number, "?"), int(line), int(column))

    def _is_wrapper(self, number: str) -> bool:
        path = PurePosixPath(self._sources.get(number, ""))
        return path.parent.name == "device" or path.parent.name == "include"

    def _statement(self, text: str, position: int) -> Iterator[Statement]:
        if text.startswith(".pragma"):
            return
        if match := _REGISTERS.match(text):
            for name in match[2].split(","):
                ranged = re.fullmatch(r"(%\w+)<(\d+)>", name.strip())
                yield Registers(
                    match[1],
                    ranged[1] if ranged else name.strip(),
                    int(ranged[2]) if ranged else None,
                )
        elif match := _SHARED.match(text):
            shared = self._entry.shared
            end = shared[-1].offset + shared[-1].bytes if shared else 0
            shared += _lay_out([match.groups()], end)
        elif match := _INSTRUCTION.fullmatch(text):
            operands = tuple(_operand(each) for each in _OPERANDS.findall(match[4]))
            line = self._lines.number(position)
            yield Instruction(line, self._place, match[2], match[1] == "!", match[3], operands)
        else:
            raise self._lines.error(position, f"the statement {text!r} is not translated")


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    if text.startswith("["):
        return re.sub(r"\s+", "", text)
    return tuple(text.split("|")) if "|" in text else text
