"""``linear`` with codes of 8 and 4 bits: the bits of products with expanded weights, or of integers."""

from itertools import product

import pytest
import torch
from helpers.ops.op_cases import (
    before_a_closed_page,
    generator,
    has_matrix_units,
    returns,
    two_threads,
)

from specdec_ext import ops
from specdec_ext.ops.quantise import QuantisedWeight
from specdec_ext.reference.linear import linear as reference

DTYPES = [torch.float32, torch.bfloat16]
# The kind of codes: bits, dtype of scales, whether there are offsets, whether there are levels.
KINDS = {
    "int8": (8, torch.float32, False, False),
    "int8-bfloat16-scales": (8, torch.bfloat16, False, False),
    "int8-offsets": (8, torch.float32, True, False),
    "int4": (4, torch.float32, False, False),
    "int4-bfloat16-scales": (4, torch.bfloat16, False, False),
    "int4-offsets": (4, torch.float32, True, False),
    "levels": (4, torch.float32, False, True),
}
GROUP_SIZES = [32, 64, 128, None]
# Below, at and beyond a block (32), the expanded chunk of a tile and a block of many rows (256).
INS = [1, 31, 32, 33, 255, 256, 300, 513, 1056]
ROWS = [1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 70]

kinds = pytest.mark.parametrize("kind", KINDS)
both_orders = pytest.mark.parametrize("many_rows", [False, True], ids=["few", "many"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
needs_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"),
    reason="without fused multiply-add the op has bits of its own",
)


def random_weight(kind, outs, ins, group_size=32, seed=0):
    bits, scale_dtype, has_offsets, has_levels = KINDS[kind]
    rng = generator(seed)
    lowest, highest = (-128, 128) if bits == 8 else (0, 16)
    codes = torch.randint(lowest, highest, (outs, ins), generator=rng)
    groups = 1 if group_size is None else -(-ins // group_size)
    scales = (torch.rand(outs, groups, generator=rng) + 0.1) / highest / ins**0.5
    offsets = torch.randn(outs, groups, generator=rng) / ins**0.5 if has_offsets else None
    levels = torch.randn(16, generator=rng) * 16 if has_levels else None
    return QuantisedWeight.pack(codes, scales.to(scale_dtype), offsets, bits=bits, levels=levels)


def random_rows(rows, ins, outs, dtype, seed=1):
    rng = generator(seed)
    return (
        torch.randn(rows, ins, generator=rng).to(dtype),
        torch.randn(outs, generator=rng).to(dtype),
    )


def of_expanded(input, weight, bias, many_rows):
    if input.dtype == torch.bfloat16 and many_rows:
        return ops.linear(input, weight.dequantise().bfloat16(), bias, many_rows=True)
    wide = None if bias is None else bias.float()
    product = ops.linear(input.float(), weight.dequantise(), wide, many_rows=many_rows)
    return product.to(input.dtype)


def are_integers(kind, dtype, many_rows):
    """Whether codes are multiplied as integers."""
    return dtype == torch.bfloat16 and not many_rows and kind != "levels"


@kinds
@dtypes
@both_orders
def test_equals_the_product_with_expanded_weights(kind, dtype, many_rows):
    if are_integers(kind, dtype, many_rows):
        pytest.skip("the inputs are integers")
    for ins, group_size in product(INS, GROUP_SIZES):
        for outs, rows in ((1, 1), (25, 9), (50, 33)):
            weight = random_weight(kind, outs, ins, group_size)
            input, bias = random_rows(rows, ins, outs, dtype)
            for b in (bias, None):
                actual = ops.linear(input, weight, b, many_rows=many_rows)
                assert actual.dtype == dtype
                assert torch.equal(actual, of_expanded(input, weight, b, many_rows))


@needs_fma
@kinds
@both_orders
def test_equals_reference(kind, many_rows):
    for group_size, ins, (outs, rows) in product(
        (32, 64, 128, None), (300, 576), ((25, 5), (70, 1), (96, 41))
    ):
        weight = random_weight(kind, outs, ins, group_size)
        for dtype in DTYPES:
            input, bias = random_rows(rows, ins, outs, dtype)
            expected = reference(
                input, weight, bias, many_rows=many_rows, matrix_units=has_matrix_units()
            )
            assert torch.equal(ops.linear(input, weight, bias, many_rows=many_rows), expected)


def inputs_of_all_sizes(rows, ins):
    """bfloat16 numbers of very different magnitude, with zeros, a row of zeros and one of subnormals."""
    input, _ = random_rows(rows, ins, 1, torch.float32, seed=3)
    input *= torch.exp2(torch.randint(-20, 20, (rows, ins), generator=generator(4)))
    input[torch.rand(rows, ins, generator=generator(5)) < 0.2] = 0
    input[0] = 0
    input[-1] *= 2.0**-125
    return input.bfloat16()


@needs_fma
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "levels"])
def test_integers_equal_reference(kind):
    for ins, group_size in product([*INS, 64, 96, 128, 576], GROUP_SIZES):
        for outs, rows in ((1, 2), (25, 9)):
            weight = random_weight(kind, outs, ins, group_size)
            input, bias = (
                inputs_of_all_sizes(rows, ins),
                random_rows(rows, ins, outs, torch.bfloat16)[1],
            )
            for b in (bias, None):
                expected = reference(input, weight, b, matrix_units=has_matrix_units())
                assert torch.equal(ops.linear(input, weight, b), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "levels"])
def test_the_error_of_integers_is_bounded(kind):
    """Each input is off by at most 2^-15 (on matrix units 2^-14) of the largest of its 64, or by nothing."""
    for ins, group_size in product([64, 300, 1056], GROUP_SIZES):
        weight = random_weight(kind, 25, ins, group_size)
        input = inputs_of_all_sizes(7, ins)
        weights = weight.expand()[0] * weight.expand()[1]
        offsets = weight.expand()[2]
        weights = weights if offsets is None else weights + offsets
        largest = torch.cat(
            [
                part.abs().amax(-1, keepdim=True).expand_as(part)
                for part in input.double().split(64, -1)
            ],
            -1,
        )
        terms = (input.double().abs() @ weights.abs().mT) * 1e-6  # float32 sums
        bits = 14 if has_matrix_units() and group_size != 32 else 15
        bound = (largest * 2.0**-bits) @ weights.abs().mT + terms
        expected = input.double() @ weights.mT
        bound += expected.abs() * 2.0**-8  # the output is bfloat16
        assert ((ops.linear(input, weight).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["int8", "int4", "int4-offsets", "levels"])
@dtypes
@both_orders
def test_every_code_at_every_place_of_a_block(kind, dtype, many_rows):
    """One input at a time is 1, so the outputs are the weights."""
    bits = KINDS[kind][0]
    count = 2**bits
    places = torch.arange(64)
    codes = (torch.arange(count)[:, None] + places) % count - (128 if bits == 8 else 0)
    given = random_weight(kind, count, 64)
    scales = given.scales[..., 0] if given.scales.ndim == 3 else given.scales
    offsets = given.scales[..., 1] if given.scales.ndim == 3 else None
    weight = QuantisedWeight.pack(codes, scales, offsets, bits=bits, levels=given.levels)
    outputs = ops.linear(torch.eye(64, dtype=dtype), weight, many_rows=many_rows)
    numbers = codes.double() if given.levels is None else given.levels.double()[codes]
    shift = 8 if kind == "int4" else 0
    expected = (numbers - shift) * scales.double()[:, places // 32]
    if are_integers(kind, dtype, many_rows):
        expected = expected.float().double()
    if offsets is not None:
        expected = expected + offsets.double()[:, places // 32]
    assert torch.equal(outputs.mT, expected.float().to(dtype))


@kinds
@dtypes
@both_orders
def test_a_row_does_not_depend_on_the_others(kind, dtype, many_rows):
    weight = random_weight(kind, 50, 300, 64)
    input, bias = random_rows(70, 300, 50, dtype)
    alone = torch.cat([ops.linear(row[None], weight, bias, many_rows=many_rows) for row in input])
    for rows in ROWS:
        together = ops.linear(input[-rows:], weight, bias, many_rows=many_rows)
        assert torch.equal(together, alone[-rows:])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@dtypes
@both_orders
def test_an_output_does_not_depend_on_the_others(kind, dtype, many_rows):
    weight = random_weight(kind, 100, 300, 64)
    input, _ = random_rows(7, 300, 100, dtype)
    together = ops.linear(input, weight, many_rows=many_rows)
    for outs in (1, 2, 23, 24, 25, 63, 97):
        part = QuantisedWeight(weight.codes[-outs:], weight.scales[-outs:], 300)
        actual = ops.linear(input, part, many_rows=many_rows)
        assert torch.equal(actual, together[:, -outs:])


@both_orders
def test_strides_do_not_change_the_result(many_rows):
    weight = random_weight("int8", 31, 45)
    wide = torch.full((33, 47), 99, dtype=torch.int8)
    wide[1:32, 1:46] = weight.codes
    strided = QuantisedWeight(wide[1:32, 1:46], weight.scales, 45)
    for dtype in DTYPES:
        input, bias = random_rows(12, 45, 31, dtype)
        spread = torch.full((12, 101), torch.nan, dtype=dtype)
        spread[:, 51:96] = input
        expected = ops.linear(input, weight, bias, many_rows=many_rows)
        actual = ops.linear(spread[:, 51:96], strided, bias, many_rows=many_rows)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["int8", "int4-bfloat16-scales"])
@pytest.mark.parametrize("ins", [45, 96, 192])
@dtypes
@both_orders
def test_nothing_is_read_behind_the_last_code(kind, ins, dtype, many_rows):
    weight = random_weight(kind, 3, ins)
    codes, scales = (before_a_closed_page(tensor) for tensor in (weight.codes, weight.scales))
    guarded = QuantisedWeight(codes, scales, ins)
    input, _ = random_rows(5, ins, 3, dtype)
    assert returns(lambda: ops.linear(input, guarded, many_rows=many_rows))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@both_orders
def test_threads_do_not_change_the_result(kind, many_rows):
    weight = random_weight(kind, 1001, 700)
    input, bias = random_rows(5, 700, 1001, torch.bfloat16)
    expected = ops.linear(input, weight, bias, many_rows=many_rows)
    with two_threads():
        for _ in range(20):
            assert torch.equal(ops.linear(input, weight, bias, many_rows=many_rows), expected)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 5, 0)], ids=str)
def test_empty_inputs(shape):
    rows, ins, outs = shape
    weight = random_weight("int4", outs, ins)
    assert ops.linear(torch.zeros(rows, ins), weight).shape == (rows, outs)


@dtypes
@pytest.mark.parametrize("ins", [64, 96, 100])
def test_a_scale_that_is_not_finite_spoils_only_its_output(dtype, ins):
    weight = random_weight("int4", 5, ins)
    weight.scales[2, :2] = torch.nan
    outputs = ops.linear(torch.ones(3, ins, dtype=dtype), weight)
    assert outputs[:, 2].isnan().all() and outputs[:, [0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@dtypes
@pytest.mark.parametrize("ins", [32, 64, 96, 100])
def test_scales_of_earlier_products_spoil_nothing(kind, dtype, ins):
    """A thread keeps the memory of its tables of scales."""
    spoilt, weight = random_weight(kind, 25, 640), random_weight(kind, 25, ins)
    spoilt.scales.fill_(torch.nan)
    assert ops.linear(torch.ones(3, 640, dtype=dtype), spoilt).isnan().all()
    assert ops.linear(torch.ones(3, ins, dtype=dtype), weight).isfinite().all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "levels"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_an_input_that_is_not_finite_spoils_only_its_row(kind, number):
    weight = random_weight(kind, 5, 300)
    for place in (0, 63, 64, 299):
        input, _ = random_rows(3, 300, 5, torch.bfloat16)
        input[1, place] = number
        outputs = ops.linear(input, weight)
        assert outputs[1].isnan().all() and outputs[[0, 2]].isfinite().all()


def isa_results():
    results = []
    for kind, dtype, many_rows in product(KINDS, DTYPES, [False, True]):
        test_every_code_at_every_place_of_a_block("int4", dtype, many_rows)
        weight = random_weight(kind, 50, 300, 64)
        input, bias = random_rows(33, 300, 50, dtype)
        results.append(ops.linear(input, weight, bias, many_rows=many_rows))
        if are_integers(kind, dtype, many_rows):
            input = inputs_of_all_sizes(9, 300)[1:-1]
            results.append(ops.linear(input, weight) / input.abs().amax(-1, keepdim=True))
        else:
            assert torch.equal(results[-1], of_expanded(input, weight, bias, many_rows))
    return results


@kinds
@dtypes
def test_opcheck(kind, dtype):
    weight = random_weight(kind, 4, 40)
    input, bias = random_rows(6, 40, 4, dtype)
    for many_rows in (False, True):
        arguments = (input, weight.codes, bias, many_rows, weight.scales, weight.levels)
        torch.library.opcheck(torch.ops.specdec.linear, arguments)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight", lambda t: t.float(), r"weight with scales must be torch.int8 .*got torch.float32"),
        ("weight", lambda t: t[:, :10], r"weight must be \[outs, 16 \* .* = \[3, 32\], got shape \[3, 10\]"),
        ("weight", lambda t: t.to(torch.int8), r"weight must be \[outs, ins\] = \[3, 64\]"),
        ("weight", lambda t: t.mT.contiguous().mT, r"weight must be contiguous .*, got stride 3"),
        ("scales", lambda t: t.half(), r"scales must be contiguous float32 .*got torch.float16"),
        ("scales", lambda t: t[:2], r"scales must be .*\[3, groups\].*of shape \[2, 2\]"),
        ("scales", lambda t: t.mT.contiguous().mT, r"scales must be contiguous"),
        ("scales", lambda t: t.expand(3, 2)[..., None].expand(3, 2, 3), r"scales must be .*\[3, 2, 3\]"),
        ("scales", lambda t: t.new_zeros(3, 3), r"scales must have one group, or one for each 32"),
        ("scales", lambda t: t.new_zeros(3, 0), r"scales must have one group, or one for each 32"),
        ("levels", lambda t: t[:15], r"levels must be \[16\]"),
        ("levels", lambda t: t.double(), r"levels must be torch.float32"),
    ],
)  # fmt: skip
def test_rejects(name, change, message):
    arguments = {
        "weight": torch.zeros(3, 32, dtype=torch.uint8),
        "scales": torch.zeros(3, 2),
        "levels": torch.zeros(16),
    }
    arguments[name] = change(arguments[name])
    weight, scales, levels = arguments.values()
    with pytest.raises(ValueError, match=f"specdec::linear: argument {message}"):
        torch.ops.specdec.linear(torch.zeros(2, 64), weight, None, False, scales, levels)
