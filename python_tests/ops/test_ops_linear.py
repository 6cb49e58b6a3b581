"""``linear``: the op equals its specification bit for bit, so a row never depends on the others.

The op has no CUDA kernel; the claims are about CPU instruction sets, threads and strides. Its error against
float64 is at most twice torch's in the same dtype, plus one rounding of the largest output.
"""

from functools import partial

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
from specdec_ext.reference.linear import linear as linear_reference

DTYPES = [torch.float32, torch.bfloat16]
FEW, MANY = partial(ops.linear, many_rows=False), partial(ops.linear, many_rows=True)


def columns(weight):
    """The same matrix stored by columns, with NaN between them and none after the last."""
    outs, ins = weight.shape
    wide = weight.new_full((ins, outs + 3), torch.nan)
    wide[:, 3:] = weight.T
    return wide[:, 3:].T


def TRANSPOSED(input, weight, bias=None):
    return ops.linear(input, columns(weight), bias)


# Below, at and beyond a step (16 or 32), a chunk (from 1024 for six rows to 6144 for one), and a tile or a
# group of 16 to 64 outputs.
IN_FEATURES = [1, 15, 16, 17, 33, 256, 511, 513, 1024, 1056, 2049, 6160]
OUT_FEATURES = [1, 2, 7, 24, 25, 50, 63, 97]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 25, 31, 32, 33, 70]

every_product = pytest.mark.parametrize(
    "linear", [FEW, MANY, TRANSPOSED], ids=["few", "many", "transposed"]
)
needs_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"),
    reason="without fused multiply-add the op has bits of its own",
)


def skip_if_on_matrix_units(dtype):
    if has_matrix_units() and dtype == torch.bfloat16:
        pytest.skip("matrix units have an order of their own")


def random_arguments(rows, in_features, out_features, dtype, seed=0):
    rng = generator(seed)
    input = torch.randn(rows, in_features, generator=rng)
    weight = torch.randn(out_features, in_features, generator=rng) * max(1, in_features) ** -0.5
    bias = torch.randn(out_features, generator=rng)
    return input.to(dtype), weight.to(dtype), bias.to(dtype)


@needs_fma
@pytest.mark.parametrize("many_rows", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", IN_FEATURES)
def test_equals_reference(in_features, dtype, many_rows):
    reference = partial(linear_reference, many_rows=many_rows, matrix_units=has_matrix_units())
    for rows, out_features in ((9, 25), (3, 3), (41, 70)):
        input, weight, bias = random_arguments(rows, in_features, out_features, dtype)
        for b in (bias, None):
            actual = ops.linear(input, weight, b, many_rows=many_rows)
            assert torch.equal(actual, reference(input, weight, b))


@needs_fma
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", IN_FEATURES)
def test_transposed_weights_have_the_order_of_many_rows_in_float32(in_features, dtype):
    """Up to 32 rows and beyond, which two loops compute, and whatever the caller says."""
    for rows, out_features in ((3, 25), (5, 70), (40, 21)):
        input, weight, bias = random_arguments(rows, in_features, out_features, dtype)
        for b in (bias, None):
            wide = (input.float(), weight.float(), None if b is None else b.float())
            expected = linear_reference(*wide, many_rows=True).to(dtype)
            assert torch.equal(linear_reference(input, columns(weight), b), expected)
            for many_rows in (False, True):
                actual = ops.linear(input, columns(weight), b, many_rows=many_rows)
                assert torch.equal(actual, expected)


def test_transposed_weights_are_read_in_any_tiles():
    """The sums of one row are in tiles of 4096 outputs."""
    input, weight, bias = random_arguments(40, 300, 4200, torch.float32)
    together = TRANSPOSED(input, weight, bias)
    for rows in (1, 3, 32):
        assert torch.equal(TRANSPOSED(input[:rows], weight, bias), together[:rows])


@pytest.mark.parametrize("rows", [1, 3, 9, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("linear", [FEW, MANY], ids=["few", "many"])
def test_nothing_is_read_behind_inputs_and_weights(dtype, rows, linear):
    for in_features, out_features in ((45, 21), (64, 50)):
        input, weight, _ = random_arguments(rows, in_features, out_features, dtype)
        stored = before_a_closed_page(input), before_a_closed_page(weight)
        assert returns(lambda both=stored: linear(*both))


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_read_behind_the_last_column(dtype, rows):
    input, weight, _ = random_arguments(rows, 45, 21, dtype)
    stored = before_a_closed_page(weight.T.contiguous())
    assert returns(lambda: ops.linear(input, stored.T))


@needs_fma
@pytest.mark.parametrize(
    ("elements", "dtype", "expected"),
    [
        ({0: 2.0**24, 16: 1}, torch.float32, 2.0**24),  # one lane: lost
        ({0: 2.0**24, 8: 1, 4: 1}, torch.float32, 2.0**24),  # lane 8 meets lane 0 first, then 4
        ({0: 2.0**24, 12: 1, 4: 1}, torch.float32, 2.0**24 + 2),  # lanes 12 and 4 meet before
        ({0: 2.0**24, 2: 1, 1: 1}, torch.float32, 2.0**24),
        ({0: 2.0**24, 3: 1, 1: 1}, torch.float32, 2.0**24 + 2),
        ({1: 2.0**24, 33: -(2.0**24), 32: 1}, torch.bfloat16, 1),  # of a pair, the second first
        ({0: 2.0**24, 32: -(2.0**24), 33: 1}, torch.bfloat16, 0),
        ({0: 2.0**24, 2: 1, 32: -(2.0**24)}, torch.bfloat16, 1),  # the next pair, the next lane
    ],
)
def test_worked_example(elements, dtype, expected):
    """2^24 + 1 is no float32: the sum shows the order."""
    skip_if_on_matrix_units(dtype)
    weight = torch.zeros(1, 34)
    weight[0, list(elements)] = torch.tensor(list(elements.values()), dtype=torch.float32)
    assert FEW(torch.ones(1, 34, dtype=dtype), weight.to(dtype)).item() == expected


@needs_fma
@pytest.mark.parametrize(
    ("elements", "dtype", "expected"),
    [
        ({0: 2.0**24, 16: 1, 17: 1}, torch.float32, 2.0**24),  # one sum, one after the other
        ({0: 1, 16: 1, 17: 2.0**24}, torch.float32, 2.0**24 + 2),
        ({32: 2.0**24, 33: 1}, torch.bfloat16, 2.0**24),  # the second of a pair first
        ({1: 2.0**24, 0: 1, 2: -(2.0**24)}, torch.bfloat16, 0),
        ({0: 2.0**24, 1: 1, 2: -(2.0**24), 3: -1}, torch.bfloat16, -1),
        (
            {0: 2.0**24, 256: 1, 257: 1},
            torch.float32,
            2.0**24 + 2,
        ),  # the next block has its own sum
        ({0: 2.0**24, 256: 1, 257: 1}, torch.bfloat16, 2.0**24),
    ],
)
def test_worked_example_for_many_rows(elements, dtype, expected):
    skip_if_on_matrix_units(dtype)
    weight = torch.zeros(1, 260)
    weight[0, list(elements)] = torch.tensor(list(elements.values()), dtype=torch.float32)
    assert MANY(torch.ones(1, 260, dtype=dtype), weight.to(dtype)).item() == expected


def check_worked_examples_of_matrix_units():
    for elements, expected in (
        ({0: 2.0**24, 2: 1, 4: -(2.0**24)}, 0),  # one sum takes the first elements of pairs
        ({0: 2.0**24, 1: 1, 2: -(2.0**24)}, 1),  # and another one the second elements
        ({0: 2.0**24, 32: 1, 34: -(2.0**24)}, 1),  # the next 32 elements have sums of their own,
        ({0: 2.0**24, 32: 1, 33: 1, 64: -(2.0**24)}, 2),  # which are added first,
        ({0: 2.0**24, 32: 1, 64: -(2.0**24)}, 0),  # then to those before
        ({0: 2.0**-126, 1: -1.5 * 2.0**-126}, 0),  # subnormal
    ):
        weight = torch.zeros(1, 70)
        weight[0, list(elements)] = torch.tensor(list(elements.values()), dtype=torch.float32)
        for linear in (FEW, MANY):
            input = torch.ones(1, 70, dtype=torch.bfloat16)
            assert linear(input, weight.bfloat16()).item() == expected


def test_worked_example_for_matrix_units():
    if not has_matrix_units():
        pytest.skip("needs AMX; test_instruction_sets emulates it")
    check_worked_examples_of_matrix_units()


@every_product
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [40, 4096])
def test_error_is_at_most_twice_torchs(in_features, dtype, linear):
    input, weight, bias = random_arguments(33, in_features, 300, dtype)
    exact = torch.nn.functional.linear(input.double(), weight.double(), bias.double())
    torchs = torch.nn.functional.linear(input, weight, bias)
    floor = exact.abs().max() * torch.finfo(dtype).eps
    error = (linear(input, weight, bias) - exact).abs().max()
    assert error <= 2 * (torchs - exact).abs().max() + floor


@every_product
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [7, 256, 1100, 8300])
def test_a_row_does_not_depend_on_the_others(in_features, dtype, linear):
    """Every number of rows, and the row at every position of the batch."""
    input, weight, bias = random_arguments(70, in_features, 50, dtype)
    alone = torch.cat([linear(row[None], weight, bias) for row in input])
    for rows in ROWS:
        assert torch.equal(linear(input[:rows], weight, bias), alone[:rows])
        assert torch.equal(linear(input[-rows:], weight, bias), alone[-rows:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_several_passes(dtype):
    """A pass takes 32 rows in the order for few rows, and 512 in the order for many and on matrix units."""
    input, weight, bias = random_arguments(1040, 300, 70, dtype)
    for linear in (FEW, MANY, TRANSPOSED):
        together = linear(input, weight, bias)
        for rows in (slice(506, 518), slice(511, 1040), slice(0, 513)):
            assert torch.equal(linear(input[rows], weight, bias), together[rows])


@every_product
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_output_does_not_depend_on_the_others(dtype, linear):
    input, weight, bias = random_arguments(7, 300, 100, dtype)
    together = linear(input, weight, bias)
    for out_features in OUT_FEATURES:
        part = linear(input, weight[-out_features:], bias[-out_features:])
        assert torch.equal(part, together[:, -out_features:])


@every_product
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_the_result(dtype, linear):
    arguments = random_arguments(5, 700, 1001, dtype)
    expected = linear(*arguments)
    with two_threads():
        for _ in range(20):
            assert torch.equal(linear(*arguments), expected)


@every_product
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_change_the_result(dtype, linear):
    """Leading dimensions, strided and unaligned rows of input and weight, with NaN around them."""
    input, weight, bias = random_arguments(12, 45, 31, dtype)
    expected = linear(input, weight, bias)
    wide_input = torch.full((3, 5, 2, 101), torch.nan, dtype=dtype)
    view = wide_input[:, 1:, 1, 51:96]
    view.copy_(input.view(3, 4, 45))
    wide_weight = torch.full((33, 47), torch.nan, dtype=dtype)
    wide_weight[1:32, 1:46] = weight
    wide_bias = torch.full((33,), torch.nan, dtype=dtype)
    wide_bias[1:32] = bias
    actual = linear(view, wide_weight[1:32, 1:46], wide_bias[1:32])
    assert actual.shape == (3, 4, 31) and actual.is_contiguous()
    assert torch.equal(actual.flatten(0, 1), expected)
    assert torch.equal(linear(input[5], weight, bias), expected[5])
    assert torch.equal(linear(input.view(2, 1, 3, 2, 45), weight, bias).view(12, 31), expected)
    expanded = linear(input[:1].expand(6, 45), weight[:1].expand(9, 45))
    assert torch.equal(expanded, expanded[:1, :1].expand(6, 9))


@every_product
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)], ids=str)
def test_empty_inputs_equal_torch(shape, dtype, linear):
    input, weight, bias = random_arguments(*shape, dtype)
    expected = torch.nn.functional.linear(input, weight, bias)
    actual = linear(input, weight, bias)
    assert actual.shape == expected.shape and torch.equal(actual, expected)


@every_product
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_propagate(dtype, linear):
    inf, nan, largest = torch.inf, torch.nan, torch.finfo(dtype).max
    input = torch.zeros(6, 21, dtype=dtype)
    input[:, 20] = torch.tensor([1.0, inf, -inf, nan, largest, 2.0])
    weight = torch.zeros(4, 21, dtype=dtype)
    weight[:, 20] = torch.tensor([1.0, 0.0, -2.0, inf])
    expected = torch.nn.functional.linear(input, weight)
    torch.testing.assert_close(linear(input, weight), expected, rtol=0, atol=0, equal_nan=True)


def isa_results():
    """Also checks what holds in every instruction set."""
    results = []
    if has_matrix_units():
        check_worked_examples_of_matrix_units()
        for in_features in IN_FEATURES:
            test_equals_reference(in_features, torch.bfloat16, False)
    for dtype in DTYPES:
        for linear in (FEW, MANY, TRANSPOSED):
            test_error_is_at_most_twice_torchs(40, dtype, linear)
            test_strides_do_not_change_the_result(dtype, linear)
            for in_features in (7, 1100):
                test_a_row_does_not_depend_on_the_others(in_features, dtype, linear)
                results.append(linear(*random_arguments(33, in_features, 50, dtype)))
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_opcheck(with_bias, dtype):
    input, weight, bias = random_arguments(6, 9, 4, dtype)
    for many_rows in (False, True):
        for stored in (weight, columns(weight)):
            arguments = (input.view(2, 3, 9), stored, bias if with_bias else None, many_rows)
            torch.library.opcheck(torch.ops.specdec.linear, arguments)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("input", lambda t: t.half(), r"must be torch.float32 or torch.bfloat16, got torch.float16"),
        ("input", lambda t: t[0, 0], r"must be \[..., in_features\], got shape \[\]"),
        ("input", lambda t: t[:, ::2], r"must be contiguous in its last dimension, got stride 2"),
        ("input", lambda t: t.new_zeros(4, 4, 4, 6).permute(2, 1, 0, 3),
            r"of shape \[4, 4, 4, 6\] has rows at three or more independent strides; call"),
        ("weight", lambda t: t.bfloat16(), r"must be torch.float32, got torch.bfloat16; convert"),
        ("weight", lambda t: t[0], r"must be \[out_features, in_features\], got shape \[6\]"),
        ("weight", lambda t: t[:, :5], r"must be .* = \[3, 6\], got shape \[3, 5\]"),
        ("weight", lambda t: t.new_zeros(6, 12)[::2, ::2], r"must be contiguous .*, got stride 2; call"),
        ("weight", lambda t: t.T.contiguous()[:5].T, r"must be .* = \[3, 6\], got shape \[3, 5\]"),
        ("bias", lambda t: t[:2], r"must be \[out_features\] = \[3\], got shape \[2\]"),
        ("bias", lambda t: t.bfloat16(), r"must be torch.float32, got torch.bfloat16"),
        ("bias", lambda t: t.new_zeros(6)[::2], r"must be contiguous .*, got stride 2; call"),
    ],
)  # fmt: skip
def test_rejects(name, change, message):
    arguments = {"input": torch.zeros(2, 6), "weight": torch.zeros(3, 6), "bias": torch.zeros(3)}
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"specdec::linear: argument {name} {message}"):
        ops.linear(**arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_refused():
    input, weight, _ = (t.cuda() for t in random_arguments(2, 3, 4, torch.float32))
    with pytest.raises(ValueError, match=r"must be on the CPU; .* torch.nn.functional.linear"):
        ops.linear(input, weight)
