"""Theoretical occupancy: how many warps of a kernel an SM can hold, as a share of what it could hold.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Registers go to
warps in units of 256, and a warp lives in one of the SM's four partitions; shared memory goes to blocks in
units of 128 bytes, 1 KiB of each block being the system's. A test compares with NVIDIA's own calculator,
``cuda_occupancy.h``.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP_SIZE = 32
PARTITIONS = 4
REGISTERS = 64 * 1024  # per SM, and at most as many per block
REGISTER_UNIT = 256
SHARED_UNIT = 128
SYSTEM_SHARED_BYTES = 1024  # per block


@dataclass(frozen=True)
class Limits:
    """Of one streaming multiprocessor."""

    warps: int
    blocks: int
    shared_bytes: int


LIMITS = {
    "sm_80": Limits(warps=64, blocks=32, shared_bytes=164 * 1024),
    "sm_89": Limits(warps=48, blocks=24, shared_bytes=100 * 1024),
    "sm_90": Limits(warps=64, blocks=32, shared_bytes=228 * 1024),
    "sm_100": Limits(warps=64, blocks=32, shared_bytes=228 * 1024),
    "sm_120": Limits(warps=48, blocks=24, shared_bytes=100 * 1024),
}


def most_shared_bytes(arch: str) -> int:
    """Static and dynamic shared memory that one block may have, if it asks for it at the launch."""
    return LIMITS[arch].shared_bytes - SYSTEM_SHARED_BYTES


def round_up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


def blocks_per_sm(arch: str, block: int, registers: int, shared_bytes: int) -> int:
    """How many blocks of ``block`` threads are resident; 0: such a block can't be launched.

    Args:
        arch: a key of ``LIMITS``.
        registers: per thread.
        shared_bytes: static and dynamic shared memory of a block, without the system's.
    """
    limits = LIMITS[arch]
    warps = round_up(block, WARP_SIZE) // WARP_SIZE
    warp_registers = round_up(registers * WARP_SIZE, REGISTER_UNIT)
    # A launch is refused as if every partition took the block's largest share.
    if warp_registers * round_up(warps, PARTITIONS) > REGISTERS:
        return 0
    by_registers = REGISTERS // PARTITIONS // warp_registers * PARTITIONS // warps
    by_shared = limits.shared_bytes // round_up(shared_bytes + SYSTEM_SHARED_BYTES, SHARED_UNIT)
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared)


def occupancy(arch: str, block: int, registers: int, shared_bytes: int) -> float:
    """Resident warps over the SM's maximum; arguments as in ``blocks_per_sm``."""
    warps = round_up(block, WARP_SIZE) // WARP_SIZE
    return blocks_per_sm(arch, block, registers, shared_bytes) * warps / LIMITS[arch].warps
