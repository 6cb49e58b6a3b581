"""Checks of machine code (SASS) as ``nvdisasm`` prints it.

Each rule is about something that neither the emulator nor PTX can show, because ptxas decides it:

- ``local memory``: no LDL and no STL. Registers were spilled, or an array got an address.
- ``constant load``: no LDG.CONSTANT in a kernel whose blocks wait for each other (one with a GPU-scope fence).
  Such a load goes through a cache that does not see what other blocks have written in the launch.
- ``release``: a MEMBAR of GPU scope before an atomic of GPU scope. Without it other blocks may see the
  atomic before what was written ahead of it.
- ``acquire``: a CCTL.IVALL after an atomic or a strong load of GPU scope. Without it later loads may hit lines
  of L1 from before.
- ``divergent barrier``: no BAR.SYNC between a BSSY and the place where its threads meet again. Only some of a
  warp's threads may be there.

The order of instructions is that of addresses, so the last rule is a sieve, not a proof.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# How far ahead of an atomic its fence, and behind a strong load its invalidation may lie, in instructions.
FENCE_DISTANCE, INVALIDATION_DISTANCE = 8, 3


@dataclass(frozen=True)
class Instruction:
    """One line of machine code.

    Attributes:
        address: in the function, bytes.
        opcode: with its modifiers, "LDG.E.128".
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
    """A kernel's instructions in the order of their addresses, and where its labels are."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]  # label -> index of the instruction behind it


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
    """The functions in what ``nvdisasm -c`` prints."""
    functions: list[Function] = []
    for line in text.splitlines():
        if found := re.match(r"\s*//-+ \.text\.(\S+)", line):
            functions.append(Function(found[1], [], {}))
        elif not functions:
            continue
        elif found := re.match(r"(\.L_\w+):", line.strip()):
            functions[-1].labels[found[1]] = len(functions[-1].instructions)
        elif found := re.match(
            r"\s*/\*([0-9a-f]+)\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);?", line
        ):
            functions[-1].instructions.append(
                Instruction(int(found[1], 16), found[2], found[3].strip())
            )
    return functions


def check(function: Function) -> list[Finding]:
    """What breaks a rule of this module."""
    return [
        Finding(rule, function.name, each.address, each.opcode)
        for rule, each in (
            *_local_memory(function),
            *_constant_loads(function),
            *_fences(function),
            *_divergent_barriers(function),
        )
    ]


def count_loads(function: Function) -> tuple[int, int]:
    """128-bit global loads (asynchronous copies included), all global loads."""
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
        if is_atomic and not any(map(_is_fence, code[max(0, i - FENCE_DISTANCE) : i])):
            yield "release", each
        behind = code[i + 1 : i + 1 + INVALIDATION_DISTANCE]
        if not any(later.opcode == "CCTL.IVALL" for later in behind):
            yield "acquire", each


def _divergent_barriers(function: Function) -> Iterator[tuple[str, Instruction]]:
    meeting = -1  # index at which the threads of all open regions have met again
    for i, each in enumerate(function.instructions):
        if each.parts[0] == "BSSY" and (label := re.search(r"\.L_\w+", each.operands)):
            meeting = max(meeting, function.labels.get(label[0], -1))
        elif each.parts[:2] == ["BAR", "SYNC"] and i < meeting:
            yield "divergent barrier", each
