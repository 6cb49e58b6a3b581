"""``capacity_of``: the memory of a GPU by its name, of a MIG profile, or a number of bytes.

The sizes of GPUs are the totals that ``nvidia-smi`` reports. The name of a MIG profile rounds its memory to
decimal gigabytes; profiles have at least 95 % of that (NVIDIA, "Multi-Instance GPU User Guide").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specdec_ext.display.text import did_you_mean

MIB = 1 << 20
# Name -> MiB.
GPUS = {
    "T4": 15_360,
    "V100-16GB": 16_384,
    "V100-32GB": 32_768,
    "A10": 23_028,
    "L4": 23_034,
    "RTX 3090": 24_576,
    "RTX 4090": 24_564,
    "RTX 5090": 32_607,
    "A100-40GB": 40_960,
    "A40": 46_068,
    "L40S": 46_068,
    "RTX A6000": 49_140,
    "A100-80GB": 81_920,
    "H100": 81_559,
    "H200": 143_771,
    "B200": 183_359,
}
_MIG = re.compile(r"[1-7]g\.(\d{1,4})gb(\+\w+)*")
_MIG_SHARE = 0.95
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([a-z]{0,3})")


@dataclass(frozen=True)
class Capacity:
    """The memory of a device.

    Attributes:
        name: as it was given.
        num_bytes: its size.
    """

    name: str
    num_bytes: int


def capacity_of(memory: str | int) -> Capacity:
    """Return the capacity that ``memory`` names.

    Args:
        memory: a number of bytes; or a text such as ``"H100"``, ``"3g.40gb"`` (a MIG profile) or ``"24GiB"``.

    Raises:
        ValueError: for an unknown name, or a size that is not positive.
    """
    if isinstance(memory, int):
        if isinstance(memory, bool) or memory <= 0:
            raise ValueError(f"memory is {memory!r}; expected a positive number of bytes")
        return Capacity(f"{memory:,} bytes", memory)
    text = " ".join(memory.split())
    for found in (_gpu(text), _mig(text), _size(text)):
        if found:
            return Capacity(text, found)
    meant = did_you_mean(text.upper(), GPUS)
    raise ValueError(
        f"memory {text!r} is not known{meant}; expected a GPU ({', '.join(GPUS)}), a MIG profile such as "
        "3g.40gb, or a size such as 24GiB"
    )


def _gpu(text: str) -> int | None:
    plain = {re.sub(r"[\s-]", "", name).lower(): size for name, size in GPUS.items()}
    size = plain.get(re.sub(r"[\s-]|nvidia|geforce", "", text.lower()))
    return None if size is None else size * MIB


def _mig(text: str) -> int | None:
    profile = _MIG.fullmatch(text.lower())
    return None if profile is None else int(int(profile[1]) * 10**9 * _MIG_SHARE)


def _size(text: str) -> int | None:
    size = _SIZE.fullmatch(text.lower())
    return None if size is None or size[2] not in _UNITS else int(float(size[1]) * _UNITS[size[2]])
