"""Entries of PTX -> C++ for the emulator. Each entry becomes a function that a fiber runs.

A register is a local variable that holds bits: ``uint16_t``, ``uint32_t`` or ``uint64_t``, and ``bool`` for
predicates. A shared variable is an offset in the block's shared memory. Each statement that can report an
error has the place of the kernel's source in a ``#line``, so that the emulator names it.
"""

from __future__ import annotations

import re

from build_support.ptx.opcodes import c_type, find_rule
from build_support.ptx.syntax import (
    BYTES,
    Brace,
    Entry,
    Instruction,
    Label,
    Module,
    Operand,
    Place,
    PtxError,
    Registers,
    read_module,
)

SPECIAL = {
    "%tid.x": "t.tid_x",
    "%ntid.x": "t.ntid_x",
    "%ctaid.x": "t.ctaid_x",
    "%ctaid.y": "t.ctaid_y",
    "%nctaid.x": "t.nctaid_x",
    "%nctaid.y": "t.nctaid_y",
    "%laneid": "t.laneid()",
}
# Dynamic shared memory begins here (kDynamicShared in csrc/testing/emulation/ptx/thread.h).
DYNAMIC_SHARED = 1 << 20
# What a register holds before it is written. A kernel that uses it behaves alike in every run.
UNWRITTEN = {
    "pred": "true",
    "b16": "0xABAB",
    "b32": "0xABABABAB",
    "b64": "0xABABABABABABABAB",
}
_REFERENCE = re.compile(r"\$(\d):(\w+)(?:\[(\d)\]|\|(\w+))?(?:\?(\d+))?")
# Calls of the thread that can wait or fail.
_NEEDS_PLACE = re.compile(r"\bt\.(?!param|approximate|laneid)\w+[(<]")


def translate(text: str, name: str) -> str:
    """The C++ of a PTX file; ``name`` is its name for messages.

    Raises:
        PtxError: if an instruction or directive is unknown.
    """
    module = read_module(text, name)
    parts = [
        "// Translated from PTX by build_support/ptx.",
        '#include "testing/emulation/ptx/arithmetic.h"',
    ]
    parts += ["using namespace specdec::ptx;", "namespace {"]
    for number, entry in enumerate(module.entries):
        parts += _Writer(module, entry).function(number)
    parts.append("}  // namespace")
    parts += [_record(number, entry) for number, entry in enumerate(module.entries)]
    return "\n".join(parts) + "\n"


def _record(number: int, entry: Entry) -> str:
    name = _without_hash(entry.name)
    shared = max((each.offset + each.bytes for each in entry.shared), default=0)
    return (
        f'extern "C" {{ SPECDEC_PTX_ENTRY const Entry ptx_{name} = {{"{name}", run_{number}, {shared}, '
        f"params_{number}, {len(entry.params)}}}; }}"
    )


def _without_hash(name: str) -> str:
    """The name as the host's compiler spells it: nvcc gives each anonymous namespace a name of its own."""

    def replace(match: re.Match[str]) -> str:
        rest = name[match.end(1) + int(match[1]) :]
        return "12_GLOBAL__N_1" + _without_hash(rest)

    return re.sub(r"(\d+)_GLOBAL__N__.*", replace, name)


class _Writer:
    """Writes the function of one entry."""

    def __init__(self, module: Module, entry: Entry) -> None:
        self._module, self._entry = module, entry
        self._kinds: dict[str, str] = {}
        self._values = {each.name: str(each.offset) for each in entry.params}
        self._values |= {each.name: str(each.offset) for each in entry.shared}
        self._values |= {name: str(DYNAMIC_SHARED) for name in module.dynamic_shared}
        self._place: Place | None = None

    def function(self, number: int) -> list[str]:
        params = ", ".join(
            f"{{{each.offset}, {each.bytes}, {each.alignment}}}" for each in self._entry.params
        )
        lines = [f"const Param params_{number}[] = {{{params}}};"]
        lines.append(f"void run_{number}([[maybe_unused]] Thread& t) {{")
        for statement in self._entry.statements:
            if isinstance(statement, Registers):
                lines.append(self._declare(statement))
            elif isinstance(statement, Label):
                lines.append(f"{_label(statement.name)}:;")
            elif isinstance(statement, Brace):
                lines.append(statement.text)
            else:
                try:
                    lines += self._instruction(statement)
                except (KeyError, IndexError, ValueError):
                    operands = ", ".join(map(str, statement.operands))
                    raise self._error(
                        statement,
                        f"{statement.opcode} has operands that are not translated: {operands}",
                    ) from None
        return [*lines, "}"]

    def _error(self, at: Instruction, problem: str) -> PtxError:
        return PtxError(f"{self._module.name}:{at.line}: {problem}")

    def _declare(self, registers: Registers) -> str:
        first, kind = registers.name, registers.kind
        names = (
            [first] if registers.count is None else [f"{first}{i}" for i in range(registers.count)]
        )
        self._kinds |= dict.fromkeys(names, kind)
        container = _container(kind)
        variables = ", ".join(f"{_variable(name)} = {UNWRITTEN[container]}" for name in names)
        return f"{c_type(container)} {variables};"

    def _instruction(self, at: Instruction) -> list[str]:
        guard = ""
        if at.guard is not None:
            guard = f"if ({'!' if at.negated else ''}{_variable(at.guard)}) "
        if at.opcode in ("bra", "bra.uni"):
            return [f"{guard}goto {_label(at.operands[0])};"]
        if at.opcode in ("ret", "exit"):
            return [f"{guard}return;"]
        rule = find_rule(at.opcode)
        if rule is None:
            raise self._error(
                at,
                f"no rule for the instruction {at.opcode}; add one to build_support/ptx/opcodes.py",
            )
        statement = guard + self._statement(rule, at.operands)
        if at.place is None or not _NEEDS_PLACE.search(statement):
            return [statement]
        # The column counts as part of the place.
        indented = " " * max(0, at.place.column - 1) + statement
        return [f'#line {at.place.line} "{at.place.file}"', indented]

    def _statement(self, rule: str, operands: tuple[Operand, ...]) -> str:
        def read(match: re.Match[str]) -> str:
            index, kind, count, _, default = match.groups()
            if int(index) >= len(operands):
                if default is None:
                    raise IndexError(index)
                return default
            return self._read(operands[int(index)], kind, count)

        match = re.match(_REFERENCE.pattern + " = ", rule)
        if match is None:
            return _REFERENCE.sub(read, rule) + ";"
        value = _REFERENCE.sub(read, rule[match.end() :])
        return self._write(operands[int(match[1])], match[2], match[3], match[4], value)

    def _read(self, operand: Operand, kind: str, count: str | None) -> str:
        if kind == "address":
            return self._address(operand)
        if count is not None:
            if len(operand) != int(count):
                raise ValueError(operand)
            element = c_type(_container(kind) if kind == "f32" else kind)
            values = ", ".join(self._read(each, _bits(kind), None) for each in operand)
            return f"std::array<{element}, {count}>{{{values}}}"
        if isinstance(operand, tuple):  # mov.b64 %rd1, {%r1, %r2}
            width = 8 * BYTES[kind] // len(operand)
            parts = (
                f"{c_type(kind)}({self._read(each, f'b{width}', None)}) << {width * i}"
                for i, each in enumerate(operand)
            )
            return f"({' | '.join(parts)})"
        if operand in self._kinds:
            return _converted(_variable(operand), _container(self._kinds[operand]), kind)
        return _converted(self._constant(operand), "", kind)

    def _constant(self, operand: str) -> str:
        if operand in SPECIAL:
            return SPECIAL[operand]
        if operand in self._values:
            return self._values[operand]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return f"0x{operand[2:]}u"
        if re.fullmatch(r"-?\d+U?|0x[0-9a-fA-F]+U?", operand):
            value = int(operand.removesuffix("U"), 0) % 2**64
            return f"{value:#x}u" if value > 9 else str(value)
        raise KeyError(operand)

    def _address(self, operand: Operand) -> str:
        match = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", str(operand))
        if match is None:
            raise ValueError(operand)
        base, offset = match[1], int(match[2] or 0)
        if base in self._values:
            return str(int(self._values[base]) + offset)
        value = _variable(base) if base in self._kinds else self._constant(base)
        return f"{value} + {offset}" if offset > 0 else f"{value} - {-offset}" if offset else value

    def _write(
        self, target: Operand, kind: str, count: str | None, second: str | None, value: str
    ) -> str:
        if second is not None:
            pair = target if isinstance(target, tuple) else (target, "_")
            return self._unpack(value, [(pair[0], kind, "v.first"), (pair[1], second, "v.second")])
        if count is not None:
            assert isinstance(target, tuple)
            elements = [(each, kind, f"v[{i}]") for i, each in enumerate(target)]
            return self._unpack(value, elements)
        if isinstance(target, tuple):  # mov.b64 {%r1, %r2}, %rd1
            width = 8 * BYTES[kind] // len(target)
            return self._unpack(
                value, [(each, f"b{width}", f"v >> {width * i}") for i, each in enumerate(target)]
            )
        return self._assign(target, kind, value)

    def _unpack(self, value: str, parts: list[tuple[str, str, str]]) -> str:
        return f"{{ const auto v = {value}; {' '.join(self._assign(*part) for part in parts)} }}"

    def _assign(self, target: str, kind: str, value: str) -> str:
        if target == "_":
            return f"(void)({value});" if value.startswith("t.") else ""
        container = _container(self._kinds[target])
        if kind == "f32":
            value = f"as_bits({value})"
        elif kind != "pred" and BYTES[kind] < BYTES[container]:
            value = f"{c_type(kind)}({value})"
        return f"{_variable(target)} = {value};"


def _bits(kind: str) -> str:
    """The type of an element of a vector: floats stay bits."""
    return "b32" if kind == "f32" else kind


def _container(kind: str) -> str:
    """The untyped kind of a register or value of type ``kind``."""
    return kind if kind == "pred" else f"b{8 * BYTES[kind]}"


def _converted(value: str, container: str, kind: str) -> str:
    """A value of a register of type ``container``, or a constant if that is empty, as ``kind``."""
    if kind == "f32":
        return f"as_float({value})"
    if kind == "pred" or kind == container or (kind[0] == "u" and kind[1:] == container[1:]):
        return value
    return f"{c_type(kind)}({value})"


def _variable(name: str) -> str:
    """A register's name in C++: %r1 is r1, and a name without % gets one that differs from all of these."""
    return name[1:] if name.startswith("%") else f"own_{name}"


def _label(name: Operand) -> str:
    assert isinstance(name, str)
    return name.replace("$", "_")
