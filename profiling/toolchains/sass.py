"""Checks of machine code (SASS) in the output of ``nvdisasm``.

The rules are about properties that neither the emulator nor PTX can show, because ptxas decides them:

- ``local memory``: there must be no LDL and no STL. They appear if registers are spilled or if an array is
  kept in memory.
- ``constant load``: there must be no LDG.CONSTANT in a kernel with a GPU-scope fence, whose blocks wait for
  each other. Such a load uses a cache that does not see what other blocks have written in the same launch.
- ``release``: there must be a MEMBAR of GPU scope between the last global store and a later atomic of GPU
  scope. Without it other blocks may see the atomic before the stored value.
- ``acquire``: there must be a CCTL.IVALL between an atomic or a strong load of GPU scope and the next global
  load. Without it the load may hit an outdated line of the L1 cache.

Barriers in divergent branches are not checked: the order of addresses does not show which branches depend on
the thread index. The emulator reports every barrier that not all threads reach.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One line of machine code.

    Attributes:
        address: byte offset in the function.
        opcode: opcode with its modifiers, such as "LDG.E.128".
        operands: the rest of the line.
    """

    address: int
    opcode: str
    operands: str

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


@dataclass
class Function:
    """A kernel's instructions in the order of their addresses."""

    name: str
    instructions: list[Instruction]


@dataclass(frozen=True)
class Finding:
    """A rule that a kernel breaks, and where."""

    rule: str
    function: str
    address: int
    opcode: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.opcode} at {self.address:#x}"


def parse(text: str) -> list[Function]:
    """The functions in the output of ``nvdisasm -c``."""
    functions: list[Function] = []
    for line in text.splitlines():
        if found := re.match(r"\s*//-+ \.text\.(\S+)", line):
            functions.append(Function(found[1], []))
        elif not functions:
            continue
        elif found := re.match(
            r"\s*/\*([0-9a-f]+)\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);?", line
        ):
            functions[-1].instructions.append(
                Instruction(int(found[1], 16), found[2], found[3].strip())
            )
    return functions


def check(function: Function) -> list[Finding]:
    """The violations of this module's rules."""
    return [
        Finding(rule, function.name, each.address, each.opcode)
        for rule, each in (*_local_memory(function), *_constant_loads(function), *_fences(function))
    ]


def count_loads(function: Function) -> tuple[int, int]:
    """Number of 128-bit global loads (asynchronous copies included) and of all global loads."""
    loads = Counter("128" in each.parts for each in function.instructions if is_global_load(each))
    return loads[True], loads.total()


def is_global_load(instruction: Instruction) -> bool:
    return instruction.parts[0] in ("LDG", "LDGSTS")


def _local_memory(function: Function) -> Iterator[tuple[str, Instruction]]:
    for each in function.instructions:
        if each.parts[0] in ("LDL", "STL"):
            yield "local memory", each


def _constant_loads(function: Function) -> Iterator[tuple[str, Instruction]]:
    if not any(map(_is_fence, function.instructions)):
        return
    for each in function.instructions:
        if each.parts[0] == "LDG" and "CONSTANT" in each.parts:
            yield "constant load", each


def _is_fence(instruction: Instruction) -> bool:
    return instruction.parts[0] == "MEMBAR" and instruction.parts[-1] in ("GPU", "SYS")


def _fences(function: Function) -> Iterator[tuple[str, Instruction]]:
    code = function.instructions
    for i, each in enumerate(code):
        is_atomic = each.parts[0] in ("ATOM", "ATOMG", "RED", "REDG")
        is_load = each.parts[0] in ("LD", "LDG")
        if "STRONG" not in each.parts or "GPU" not in each.parts or not (is_atomic or is_load):
            continue
        if is_atomic and not _comes_first(reversed(code[:i]), _is_fence, ("ST", "STG")):
            yield "release", each
        if not _comes_first(code[i + 1 :], _invalidates, ("LD", "LDG")):
            yield "acquire", each


def _invalidates(instruction: Instruction) -> bool:
    return instruction.opcode == "CCTL.IVALL"


def _comes_first(
    code: Iterable[Instruction], wanted: Callable[[Instruction], bool], others: Sequence[str]
) -> bool:
    """Whether a wanted instruction exists and precedes all instructions whose opcode is in ``others``."""
    for each in code:
        if wanted(each):
            return True
        if each.parts[0] in others:
            return False
    return False
