"""``draft_head`` on the CPU with weights of int8: products of integers, with the same bits everywhere."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.drafters.head_cases import KINDS, elements, head_of
from helpers.ops.head_op_cases import (
    ROUNDS,
    SHAPES,
    OpRun,
    assert_equal_drafts,
    check_rows_are_independent,
    committed,
    errors_with_8_bit_weights,
)
from helpers.ops.op_cases import generator
from torch import Tensor

from specdec_ext.ops.quantise import quantise
from specdec_ext.tree.config import TreeConfig

DTYPES = [torch.float32, torch.bfloat16]
SHARED = 256  # inputs with one exponent


def product(input: Tensor, weight: Tensor) -> Tensor:
    """``input [rows, ins] @ weight [outs, ins].T`` as ``csrc/include/specdec/cpu/panels.h`` describes it."""
    codes, scales = quantise(weight, torch.int8)
    sums = torch.zeros(len(input), len(weight))
    parts = zip(input.float().split(SHARED, 1), codes.double().split(SHARED, 1), strict=True)
    for inputs, part in parts:
        exponents = torch.frexp(inputs.abs().amax(1, keepdim=True)).exponent.clamp(min=-111)
        integers = torch.ldexp(inputs.double(), 14 - exponents).round()
        exact = (integers @ part.T).float()  # below 2^53 in float64
        sums = (sums.double() + torch.ldexp(exact.double(), exponents - 14)).float()
    return (sums * scales).to(input.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [2, 30, 128, 129, 254, 600])
def test_products_are_sums_of_exact_integers(hidden, dtype):
    """The values in the cache of an EAGLE-1 head are two products of its input, with fc and v_proj, without
    norm or rotation. 40 elements are more than a pass takes, and inputs differ by many powers of two."""
    head = head_of(
        "eagle1", dtype=dtype, hidden_size=hidden, fc_bias=False, target_hidden_size=hidden
    )
    run = OpRun.start(head, 1, weights="int8")
    tokens, features = elements(head, 1, 40)
    features *= torch.exp2(torch.randint(-12, 12, (hidden,), generator=generator(1))).to(dtype)
    run.draft(TreeConfig(1), tokens, features)
    inputs = torch.cat([run.embedding[tokens[0]], features[0]], 1)
    hidden_states = product(inputs, head.tensors["fc.weight"])
    v_proj = head.tensors["layers.0.self_attn.v_proj.weight"]
    _, values = committed(run)
    actual = values[0].transpose(0, 1).flatten(1)
    assert torch.equal(actual, product(hidden_states, v_proj))


@pytest.mark.parametrize("name", KINDS)
def test_error_is_at_most_twice_the_references(name):
    ours, theirs = errors_with_8_bit_weights(name, "int8", torch.bfloat16, "cpu", 10)
    assert ours <= 2 * theirs


@pytest.mark.parametrize("name", KINDS)
def test_inputs_of_float32_have_more_bits_than_bfloat16(name):
    """Integers of 15 bits are at least 16 times as exact as bfloat16, which has 8."""
    ours, _ = errors_with_8_bit_weights(name, "int8", torch.float32, "cpu", 10)
    _, theirs = errors_with_8_bit_weights(name, "int8", torch.bfloat16, "cpu", 10)
    assert ours <= theirs / 16


@pytest.mark.parametrize(
    ("name", "tree", "dtype"),
    list(
        itertools.product(
            ["eagle1-two-layers", "mtp", "eagle3.1", "qk-norm-window", "no-fc", "p-eagle"],
            ["chain", "dynamic"],
            DTYPES,
        )
    ),
    ids=str,
)
def test_a_row_does_not_depend_on_the_others(name, tree, dtype):
    head = head_of(name, dtype=dtype)
    check_rows_are_independent(head, SHAPES[tree], ROUNDS, weights="int8")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_gets_its_root_alone(value):
    """As with weights that are not rounded; the other row keeps its bits."""
    head = head_of("eagle3")
    tokens, features = elements(head, 2, 3)
    expected = OpRun.start(head, 2, weights="int8").draft(SHAPES["static"], tokens, features)
    features[0, -1, 5] = value
    drafted = OpRun.start(head, 2, weights="int8").draft(SHAPES["static"], tokens, features)
    same = OpRun.start(head, 2).draft(SHAPES["static"], tokens, features)
    assert (drafted[1][0, 1:] == -2).all()
    assert_equal_drafts([each[:1] for each in drafted], [each[:1] for each in same])
    assert_equal_drafts([each[1:] for each in drafted], [each[1:] for each in expected])
