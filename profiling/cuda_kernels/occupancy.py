"""Theoretical occupancy: the warps of a kernel that an SM can hold, as a share of the SM's maximum.

The limits are from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
Registers are allocated per warp in units of 256, and a warp belongs to one of the SM's four partitions.
Shared memory is allocated per block in units of 128 bytes, and the system reserves 1 KiB per block. A test
compares the results with NVIDIA's own calculator, ``cuda_occupancy.h``.
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
    """Limits of one streaming multiprocessor."""

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
    """Static plus dynamic shared memory that one block may use if the launch requests it."""
    return LIMITS[arch].shared_bytes - SYSTEM_SHARED_BYTES


def round_up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


def blocks_per_sm(arch: str, block: int, registers: int, shared_bytes: int) -> int:
    """Number of resident blocks of ``block`` threads; 0 if such a block can't be launched.

    Args:
        arch: a key of ``LIMITS``.
        registers: registers per thread.
        shared_bytes: static and dynamic shared memory of a block, without the system's share.
    """
    limits = LIMITS[arch]
    warps = round_up(block, WARP_SIZE) // WARP_SIZE
    warp_registers = round_up(registers * WARP_SIZE, REGISTER_UNIT)
    # A launch is refused as if every partition held as many of the block's warps as the fullest one.
    if warp_registers * round_up(warps, PARTITIONS) > REGISTERS:
        return 0
    by_registers = REGISTERS // PARTITIONS // warp_registers * PARTITIONS // warps
    by_shared = limits.shared_bytes // round_up(shared_bytes + SYSTEM_SHARED_BYTES, SHARED_UNIT)
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared)


def occupancy(arch: str, block: int, registers: int, shared_bytes: int) -> float:
    """Resident warps divided by the SM's maximum; arguments as for ``blocks_per_sm``."""
    warps = round_up(block, WARP_SIZE) // WARP_SIZE
    return blocks_per_sm(arch, block, registers, shared_bytes) * warps / LIMITS[arch].warps
