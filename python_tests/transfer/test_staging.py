"""``Staging``: what is copied together, and what is not copied."""

import pytest
import torch

from specdec_ext.transfer import Staging


@pytest.fixture
def copies(monkeypatch):
    """Number of integers of each copy."""
    sizes, cat = [], torch.cat

    def counted(parts):
        sizes.append(sum(map(len, parts)))
        return cat(parts)

    monkeypatch.setattr(torch, "cat", counted)
    return sizes


@pytest.fixture
def staging():
    return Staging(torch.device("meta"))


def test_everything_that_is_staged_travels_together(staging, copies):
    first, second = staging.stage([1, 2]), staging.stage([[3, 4, 5], [6, 7, 8]])
    assert second.tensor.shape == (2, 3) and first.tensor.shape == (2,)
    assert copies == [8]
    staging.stage([9])
    assert first.tensor.shape == (2,) and copies == [8]


def test_values_to_which_nothing_refers_are_not_copied(staging, copies):
    for _ in range(5):
        kept = staging.stage([1, 2, 3])
    assert kept.tensor.shape == (3,)
    assert copies == [3]


def test_values_that_are_on_the_device_are_not_copied(staging, copies):
    tensor = torch.ones(2, device="meta")
    known, unknown = staging.stage([1, 1], tensor), staging.stage([5])
    assert known.tensor is tensor and known.values == [1, 1] and not copies
    assert unknown.tensor.shape == (1,) and copies == [1]


def test_on_the_cpu_values_are_tensors_when_they_are_needed(copies):
    staging = Staging(torch.device("cpu"))
    assert staging.stage([1, 2]).tensor.tolist() == [1, 2]
    assert not staging.waits and not copies
