"""``capacity_of``: GPUs, MIG profiles, sizes, and refusals."""

from __future__ import annotations

import pytest

from specdec_ext.planning.capacity import GPUS, capacity_of

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "gib"),
    [
        ("H100", 79.6),
        ("NVIDIA H100", 79.6),
        ("a100-40gb", 40.0),
        ("A100 80GB", 80.0),
        ("GeForce RTX 4090", 24.0),
        ("3g.40gb", 40e9 * 0.95 / GIB),
        ("1g.10gb+me", 10e9 * 0.95 / GIB),
        ("24GiB", 24.0),
        ("1.5 gib", 1.5),
        ("80GB", 80e9 / GIB),
        ("1073741824", 1.0),
        (GIB, 1.0),
    ],
)
def test_known_memories(memory, gib):
    assert capacity_of(memory).num_bytes / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_is_found_by_its_name(name):
    assert capacity_of(name).num_bytes == GPUS[name] << 20


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("H10", "did you mean 'H100'"),
        ("8g.40gb", "expected a GPU"),
        ("24 potatoes", "MIG profile such as 3g.40gb, or a size such as 24GiB"),
        ("", "is not known"),
        ("-1", "is not known"),
        (0, "expected a positive number of bytes"),
        (True, "expected a positive number"),
    ],
)
def test_unknown_memories_are_refused(memory, message):
    with pytest.raises(ValueError, match=message):
        capacity_of(memory)
