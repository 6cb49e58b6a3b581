"""Codes and scales of matrices: never worse than rounding to the nearest code, and close to the best."""

import pytest
import torch

from specdec_ext.models.quantised import rounding
from specdec_ext.models.quantised.rounding import rounded

SIZES = [None, 32, 64, 128, 256]


def matrix(outs=24, ins=320, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outs, ins, generator=generator).mul_(0.02).to(dtype)


def groups_of(weights, size):
    size = size or weights.shape[1]
    return [part for row in weights for part in row.split(size)]


def nearest(weights, bits, size, symmetric, span):
    """Squared error of codes that are rounded to the nearest, with scales that span the elements of a group.

    Args:
        span: the code that the element of largest magnitude becomes: -8 as in q4_0, or 7.
    """
    error = 0.0
    for group in groups_of(weights.double(), size):
        if symmetric:
            extreme = group[group.abs().argmax()]
            scale = extreme / span or 1
            codes = (group / scale).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1)
            error += float((codes * scale - group).square().sum())
        else:
            scale = (group.max() - group.min()) / ((1 << bits) - 1) or 1
            codes = ((group - group.min()) / scale).round()
            error += float((codes * scale + group.min() - group).square().sum())
    return error


def squared_error(weights, found):
    return float((found.weight.dequantise().double() - weights.double()).square().sum())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "offsets"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_search_is_not_worse_than_rounding_to_the_nearest(bits, size, symmetric):
    weights = matrix()
    found = rounded(weights, bits, size, symmetric)
    assert found.weight.bits == bits and found.weight.shape == weights.shape
    assert found.weight.group_size == min(size or 320, 320)
    half = 1 << bits - 1
    plain = min(nearest(weights, bits, size, symmetric, span) for span in (-half, half - 1))
    # Scales in bfloat16 may cost a little, which counts only where there is nothing to gain.
    assert squared_error(weights, found) <= plain * (1.001 if bits == 8 else 0.98)


@pytest.mark.parametrize("bits", [8, 4])
def test_errors_are_bounded_by_a_step(bits):
    """Every element is within a step of its scale, and all but cut-off ones within half a step."""
    weights = matrix()
    found = rounded(weights, bits, 64)
    scales = found.weight.scales.float().abs().repeat_interleave(64, 1)
    steps = (found.weight.dequantise() - weights).abs() / scales
    assert float((steps <= 0.5 + 1e-4).float().mean()) > 0.95
    assert float(steps.max()) < (1.1 if bits == 8 else 3)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("ins", [1, 31, 32, 33, 95, 129, 200])
def test_any_number_of_inputs(bits, ins):
    """The last group may be smaller, and its elements are those of the end of the row."""
    weights = matrix(5, ins)
    weights[:, -1] = 3.0  # only the scales of the last group are large
    for symmetric in (True, False):
        found = rounded(weights, bits, 32, symmetric)
        assert found.weight.shape == (5, ins)
        restored = found.weight.dequantise()
        assert torch.allclose(restored[:, -1], weights[:, -1], rtol=0.01)
        whole = (ins - 1) // 32 * 32
        alone = (
            rounded(weights[:, :whole], bits, 32, symmetric).weight.dequantise() if whole else None
        )
        if whole > 32:  # scales of a single group have another dtype
            assert torch.equal(restored[:, :whole], alone)


def test_all_codes_are_in_use():
    codes = rounded(matrix(200, 320), 4, 32).weight
    numbers = (codes.dequantise() / codes.scales.float().repeat_interleave(32, 1)).round()
    assert sorted(set(numbers.int().flatten().tolist())) == [*range(-8, 8)]


def test_the_element_of_largest_magnitude_becomes_the_lowest_code():
    """A group that codes of 4 bits represent exactly, in either direction."""
    for sign in (1.0, -1.0):
        weights = sign * 0.5 * torch.arange(-8.0, 8.0).repeat(2)[None]
        found = rounded(weights, 4, 32)
        assert found.error == 0 and torch.equal(found.weight.dequantise(), weights)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "offsets"])
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0, 1e-30])
def test_groups_of_equal_elements(value, symmetric):
    weights = torch.full((3, 64), value)
    for bits in (8, 4):
        restored = rounded(weights, bits, 32, symmetric).weight.dequantise()
        assert restored.isfinite().all()
        torch.testing.assert_close(restored, weights, rtol=0.01, atol=1e-25)


def test_offsets_represent_elements_far_from_zero():
    weights = 5 + matrix()
    assert rounded(weights, 4, 32, symmetric=False).error < 1e-3 < rounded(weights, 4, 32).error / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_error_is_that_of_the_result(dtype):
    weights = matrix(dtype=dtype)
    for bits in (8, 4):
        for symmetric in (True, False):
            found = rounded(weights, bits, 32, symmetric)
            expected = (
                squared_error(weights, found) / float(weights.double().square().sum())
            ) ** 0.5
            assert found.error == pytest.approx(expected, rel=1e-4)


def test_scales_are_small():
    """bfloat16 scales of groups; float32 for whole rows and for pairs with offsets."""
    weights = matrix()
    assert rounded(weights, 4, 32).weight.scales.dtype == torch.bfloat16
    assert rounded(weights, 8).weight.scales.dtype == torch.float32
    assert rounded(weights, 4, 32, symmetric=False).weight.scales.shape == (24, 10, 2)


def test_results_do_not_depend_on_blocks_or_runs(monkeypatch):
    weights = matrix(50)
    for bits, size in ((8, None), (4, 32), (4, 128)):
        once = rounded(weights, bits, size).weight
        monkeypatch.setattr(rounding, "_AT_ONCE", 7 * 320)
        again = rounded(weights, bits, size).weight
        monkeypatch.undo()
        assert torch.equal(once.codes, again.codes) and torch.equal(once.scales, again.scales)


def test_a_matrix_may_be_transposed_and_stays_as_it_is():
    weights = matrix(320, 24).T
    before = weights.clone()
    assert torch.equal(rounded(weights, 4, 32).weight.codes, rounded(before, 4, 32).weight.codes)
    assert torch.equal(weights, before)
