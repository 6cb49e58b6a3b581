"""Choose the GPU architectures for which the CUDA kernels are compiled.

NVIDIA and ``TORCH_CUDA_ARCH_LIST`` write a compute capability as 8.6; this module writes 86. Machine code
for 86 (``sm_86``) runs on 8.6 and later 8.x; the driver can compile PTX (``compute_80``) for every GPU from
8.0 on. The front end of nvcc runs for two families, 80 and 90, because the kernels distinguish no others.

The first of these rules that applies decides:

1. ``TORCH_CUDA_ARCH_LIST``, as torch reads it: numbers and names ("Hopper", "native", "all"), each with or
   without "+PTX". Architectures older than 8.0 are left out.
2. The GPUs that nvidia-smi shows, and PTX of their newest family.
3. The architectures of ``DEFAULTS`` that this nvcc supports, and PTX of the newest family.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from build_support import BuildError

OLDEST = 80
FAMILIES = (80, 90)
# Machine code for every GPU that is not embedded; 8.9 and 12.0 are listed for their features beyond 8.0 and
# 10.0.
DEFAULTS = (80, 89, 90, 100, 120)
NAMES = {
    "kepler": (35,),
    "maxwell": (50, 52),
    "pascal": (60, 61),
    "volta": (70,),
    "turing": (75,),
    "ampere": (80, 86),
    "ampere+tegra": (87,),
    "ada": (89,),
    "hopper": (90,),
    "blackwell": (100, 103, 120, 121),
    "blackwell+tegra": (110,),
}
VARIABLE = "TORCH_CUDA_ARCH_LIST"


@dataclass(frozen=True)
class Architectures:
    """The architectures to compile for.

    Attributes:
        machine_code: compute capabilities to make machine code for, ascending.
        ptx: families whose PTX is included in the binary, ascending.
        reason: the source of the choice, for the user.
        notes: sentences about architectures that were left out.
    """

    machine_code: tuple[int, ...]
    ptx: tuple[int, ...]
    reason: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = [f"sm_{number}" for number in self.machine_code]
        return ", ".join([*names, *(f"PTX of compute_{number}" for number in self.ptx)])

    def nvcc_flags(self) -> list[str]:
        """One ``-gencode`` option for each family, because nvcc's front end runs once per option."""
        flags = []
        for family in FAMILIES:
            codes = [f"sm_{number}" for number in self.machine_code if family_of(number) == family]
            codes += [f"compute_{family}"] if family in self.ptx else []
            if codes:
                flags.append(f"-gencode=arch=compute_{family},code=[{','.join(codes)}]")
        return flags


def choose(
    requested: str | None, known: Collection[int], visible: Iterable[int], nvcc: str = "nvcc"
) -> Architectures:
    """Apply the rule of this module.

    Args:
        requested: ``TORCH_CUDA_ARCH_LIST``; None or empty if it is not set.
        known: compute capabilities that nvcc supports.
        visible: compute capabilities of the GPUs of this machine.
        nvcc: name and version of nvcc, for messages.

    Raises:
        BuildError: if ``requested`` can't be read, or has no architecture that can be built.
    """
    known = {number for number in known if number >= OLDEST}
    if not known:
        raise BuildError(
            f"{nvcc} supports no GPU architecture from 8.0 on: install nvcc 12.0 or later"
        )
    visible = sorted(set(visible))
    if requested and requested.strip():
        return _requested(requested, known, visible, nvcc)
    supported = [number for number in visible if number >= OLDEST]
    notes = _left_out("a GPU of this machine has", set(visible) - set(supported))
    if supported:
        reason = "the GPUs of this machine"
        newer = set(supported) - known
        if newer:
            notes += (
                f"{nvcc} does not support {dotted(newer)}: the driver will compile PTX "
                "for it at the first use",
            )
        return _with_ptx(set(supported) & known, family_of(max(supported)), known, reason, notes)
    return _defaults(known, f"all that {nvcc} supports, because no GPU was found", notes)


def family_of(number: int) -> int:
    """The newest family that is not newer than the capability ``number``."""
    return max(family for family in FAMILIES if family <= number)


def dotted(numbers: Iterable[int]) -> str:
    """Write capabilities for the user: 80, 120 -> "8.0, 12.0"."""
    return ", ".join(f"{number // 10}.{number % 10}" for number in sorted(numbers))


def _defaults(known: set[int], reason: str, notes: tuple[str, ...]) -> Architectures:
    chosen = known & set(DEFAULTS)
    return _with_ptx(chosen, family_of(max(chosen)), known, reason, notes)


def _with_ptx(
    chosen: set[int], family: int, known: set[int], reason: str, notes: tuple[str, ...]
) -> Architectures:
    ptx = max(each for each in FAMILIES if each <= family and each in known)
    return Architectures(tuple(sorted(chosen)), (ptx,), reason, notes)


def _left_out(who: str, numbers: Collection[int]) -> tuple[str, ...]:
    if not numbers:
        return ()
    return (f"{who} {dotted(numbers)}, left out because the kernels need 8.0 or later",)


def _requested(requested: str, known: set[int], visible: list[int], nvcc: str) -> Architectures:
    reason = f"{VARIABLE}={requested!r}"
    chosen: set[int] = set()
    ptx: set[int] = set()
    old: set[int] = set()
    for word in filter(None, re.split(r"[;,\s]+", requested)):
        name, has_ptx = re.subn(r"\+ptx$", "", word.lower())
        if name == "all":
            everything = _defaults(known, reason, ())
            chosen.update(everything.machine_code)
            ptx.update(everything.ptx)
            continue
        numbers = _read(word, name, known, visible, nvcc)
        old |= {number for number in numbers if number < OLDEST}
        supported = {number for number in numbers if number >= OLDEST}
        chosen |= supported
        if has_ptx and supported:
            ptx.add(family_of(max(supported)))
    notes = _left_out(f"{VARIABLE} names", old)
    if not chosen:
        raise BuildError(
            f"{reason} has no architecture that specdec_ext can be built for: name 8.0 or later, or unset it"
        )
    return Architectures(tuple(sorted(chosen)), tuple(sorted(ptx)), reason, notes)


def _read(word: str, name: str, known: set[int], visible: list[int], nvcc: str) -> Collection[int]:
    """The capabilities that one word of the list stands for."""
    if name == "native":
        if not visible:
            raise BuildError(
                f"{VARIABLE} says native, but nvidia-smi shows no GPU: list capabilities such as 8.6 instead"
            )
        return visible
    if name in NAMES:
        numbers = set(NAMES[name])
        old = {number for number in numbers if number < OLDEST}
        if numbers == old or numbers & known:
            return old | numbers & known
    elif match := re.fullmatch(
        r"(\d{1,2})\.(\d)[af]?", name
    ):  # the kernels need no features of a and f
        numbers = {int(match[1] + match[2])}
        if numbers <= known or max(numbers) < OLDEST:
            return numbers
    else:
        names = [each.title() for each in NAMES if max(NAMES[each]) >= OLDEST]
        raise BuildError(
            f"{VARIABLE}: {word!r} is not an architecture; expected numbers such as 8.6 or 9.0+PTX, or "
            f"native, all, {', '.join(names)}"
        )
    raise BuildError(
        f"{VARIABLE} names {word}, which {nvcc} does not support: leave it out or install a newer nvcc"
    )


def read_nvcc_list(text: str) -> set[int]:
    """The capabilities in the output of ``nvcc --list-gpu-code``."""
    return {int(number) for number in re.findall(r"^sm_(\d+)$", text, re.MULTILINE)}


def visible_gpus() -> list[int]:
    """Capabilities of the GPUs that nvidia-smi shows; empty without a driver or with a very old one."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    found = re.findall(r"^\s*(\d+)\.(\d)\s*$", done.stdout, re.MULTILINE)
    return [int(major + minor) for major, minor in found]
