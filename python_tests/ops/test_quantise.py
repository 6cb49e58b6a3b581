"""``QuantisedWeight``: packing, expanding, and what it refuses."""

import pytest
import torch
from helpers.ops.op_cases import generator

from specdec_ext.ops.quantise import QuantisedWeight


@pytest.mark.parametrize("ins", [1, 15, 16, 17, 32, 33, 64, 100])
def test_codes_of_4_bits_survive_packing(ins):
    codes = torch.randint(0, 16, (5, ins), generator=generator(0))
    weight = QuantisedWeight.pack(codes, torch.ones(5, 1), bits=4)
    assert weight.codes.shape == (5, 16 * -(-ins // 32)) and weight.bits == 4
    assert weight.shape == (5, ins)
    assert torch.equal(weight.dequantise(), codes.float() - 8)


def test_layout_of_codes_of_4_bits():
    """Byte l of a block has input l in its low half and input 16 + l in its high half."""
    codes = torch.zeros(1, 64, dtype=torch.long)
    codes[0, [3, 16, 33, 63]] = torch.tensor([5, 9, 2, 15])
    packed = QuantisedWeight.pack(codes, torch.ones(1, 1), bits=4).codes[0]
    assert packed.nonzero().flatten().tolist() == [0, 3, 17, 31]
    assert packed[[0, 3, 17, 31]].tolist() == [9 << 4, 5, 2, 15 << 4]


@pytest.mark.parametrize(("groups", "size"), [(1, 100), (2, 64), (4, 32)])
def test_the_size_of_groups_follows_from_their_number(groups, size):
    scales = torch.arange(1.0, groups + 1).repeat(3, 1)
    weight = QuantisedWeight.pack(torch.ones(3, 100, dtype=torch.long), scales, bits=8)
    assert weight.group_size == size
    expected = (torch.arange(100) // size + 1).float().expand(3, 100)
    assert torch.equal(weight.dequantise(), expected)


def test_offsets_are_added_and_zero_points_are_exact():
    rng = generator(0)
    codes = torch.randint(0, 16, (6, 96), generator=rng)
    scales = torch.rand(6, 3, generator=rng).half()
    zeros = torch.randint(0, 16, (6, 3), generator=rng)
    weight = QuantisedWeight.pack(codes, scales, -zeros * scales.float(), bits=4)
    group = torch.arange(96) // 32
    expected = (codes - zeros[:, group]).double() * scales.double()[:, group]
    assert torch.equal(weight.dequantise(torch.float64), expected)  # of at most 16 bits


def test_levels_replace_the_codes():
    levels = torch.linspace(-1, 1, 16) ** 3
    codes = torch.arange(16).repeat(2, 2)
    weight = QuantisedWeight.pack(codes, torch.full((2, 1), 0.5), bits=4, levels=levels)
    assert torch.equal(weight.dequantise(), levels[codes] * 0.5)


def test_nbytes():
    codes = torch.zeros(4, 64, dtype=torch.long)
    weight = QuantisedWeight.pack(codes, torch.ones(4, 2).bfloat16(), bits=4)
    assert weight.nbytes == 4 * 32 + 4 * 2 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits=5; expected 8 or 4"),
        ({"codes": torch.zeros(3, 64)}, "codes is torch.float32 of shape .*; expected integers"),
        ({"codes": torch.full((3, 64), 16)}, "codes of 16 to 16; expected 0 to 15 for 4 bits"),
        ({"codes": torch.full((3, 64), -1)}, "codes of -1 to -1; expected 0 to 15"),
        ({"codes": torch.full((3, 64), 128), "bits": 8}, "expected -128 to 127 for 8 bits"),
        ({"scales": torch.ones(2, 2)}, r"scales is .*\[2, 2\]; expected .*\[3, groups\]"),
        ({"scales": torch.ones(3)}, "scales is .*; expected"),
        ({"scales": torch.ones(3, 3)}, "scales has 3 groups for 64 inputs; expected one, or"),
        ({"scales": torch.ones(3, 0)}, "scales has 0 groups for 64 inputs"),
        ({"levels": torch.ones(15)}, r"levels is .*\[15\]; expected float32 \[16\]"),
        ({"levels": torch.ones(16), "bits": 8}, "levels is .*for codes of 4 bits"),
    ],
)
def test_refuses(changes, message):
    arguments = {
        "codes": torch.ones(3, 64, dtype=torch.long),
        "scales": torch.ones(3, 2),
        "bits": 4,
    }
    with pytest.raises(ValueError, match=message):
        QuantisedWeight.pack(**{**arguments, **changes})


def test_refuses_codes_of_another_width():
    with pytest.raises(
        ValueError, match=r"codes is torch.uint8 .*expected int8 \[outs, 65\] or uint8"
    ):
        QuantisedWeight(torch.zeros(3, 32, dtype=torch.uint8), torch.ones(3, 1), 65)
