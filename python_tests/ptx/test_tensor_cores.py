"""Tensor cores that add as those of GPUs do, and what the kernels rely on.

The model is that of MMA-Sim (csrc/testing/emulation/numerics/tensor_core.h). The kernels need two properties:
a row of a product does not depend on the other rows, and terms that are zero change nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from helpers.drafters.head_cases import elements, head_of
from helpers.ops import emulation
from helpers.ops.attention_cases import Shape, decode_path, random_case, run, static_arguments
from helpers.ops.head_op_cases import OpRun, assert_equal_drafts, some_emulated
from helpers.ops.op_cases import generator
from helpers.ops.ptx_entries import HEADER, compile_text, launch
from torch import Tensor

from specdec_ext.ops import _library, packed_head
from specdec_ext.tree.config import TreeConfig

pytestmark = pytest.mark.emulated

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
MIN_EXPONENTS = {"f16": -14, "bf16": -126}
GPUS = ["ampere", "hopper"]
ENTRY = """.visible .entry mma_{type}(.param .u64 in, .param .u64 out)
{{
.reg .b32 %r<12>; .reg .b64 %rd<5>;
ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r0, %tid.x;
mul.wide.u32 %rd3, %r0, 64; add.s64 %rd1, %rd1, %rd3; mul.wide.u32 %rd4, %r0, 16; add.s64 %rd2, %rd2, %rd4;
ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1]; ld.global.v2.u32 {{%r5, %r6}}, [%rd1+16];
ld.global.v4.u32 {{%r7, %r8, %r9, %r10}}, [%rd1+32];
mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32
  {{%r7, %r8, %r9, %r10}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r7, %r8, %r9, %r10}};
st.global.v4.u32 [%rd2], {{%r7, %r8, %r9, %r10}};
ret;
}}
"""


@pytest.fixture(scope="module")
def entries(tmp_path_factory) -> ctypes.CDLL:
    text = HEADER + "".join(ENTRY.format(type=name) for name in TYPES)
    return compile_text(text, tmp_path_factory.mktemp("mma"))


def pair(matrix: Tensor, row: int, column: int) -> int:
    """Two neighbours of a row in a register."""
    low, high = matrix[row, column : column + 2].view(torch.int16).tolist()
    return (low & 0xFFFF) | high << 16


def multiply(entries: ctypes.CDLL, name: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """c [16, 8] + a [16, 16] b [16, 8] by one ``mma``."""
    words = torch.zeros(32, 16, dtype=torch.int32)
    columns, numbers = b.T.contiguous(), c.view(torch.int32)
    for lane in range(32):
        g, t = lane // 4, lane % 4 * 2
        parts = [pair(a, g + i % 2 * 8, t + i // 2 * 8) for i in range(4)]
        parts += [pair(columns, g, t + i * 8) for i in range(2)]
        words[lane, :6] = torch.tensor(parts, dtype=torch.int32)
        words[lane, 8:12] = numbers[[g, g, g + 8, g + 8], [t, t + 1, t, t + 1]]
    out = torch.zeros(32, 4)
    assert launch(entries, f"mma_{name}", words, out) is None
    fragments = out.view(8, 4, 2, 2)  # [g, t / 2, upper or lower half, column]
    return fragments.permute(2, 0, 1, 3).reshape(16, 8)


def exponent(x: float, smallest: int) -> int:
    return max(math.frexp(x)[1] - 1, smallest)


def aligned_sum(
    a: Sequence[float], b: Sequence[float], c: float, smallest: int, fraction_bits: int
) -> float:
    """The sum as MMA-Sim describes it, in exact arithmetic."""
    terms = [(Fraction(c), exponent(c, -126))]
    for x, y in zip(a, b, strict=True):
        terms.append((Fraction(x) * Fraction(y), exponent(x, smallest) + exponent(y, smallest)))
    largest = max([-126, *(power for value, power in terms if value)])
    unit = Fraction(2) ** (largest - fraction_bits)
    total = sum(int(value / unit) for value, _ in terms) * unit  # int() rounds towards zero
    place = Fraction(2) ** (exponent(float(total), -126) - 23)
    return float(int(total / place) * place)


def published(core: str, name: str, a: Sequence[float], b: Sequence[float], c: float) -> float:
    smallest = MIN_EXPONENTS[name]
    if core == "hopper":
        return aligned_sum(a, b, c, smallest, 25)
    return aligned_sum(a[8:], b[8:], aligned_sum(a[:8], b[:8], c, smallest, 24), smallest, 24)


# Addend, {k: product}, and the sum of each core; the unit in the last place of 1 is 2^-23.
ULP = 2.0**-23
SUMS = [
    (1.0, {0: ULP / 2, 5: ULP / 2}, {"exact": 1 + ULP, "ampere": 1 + ULP, "hopper": 1 + ULP}),
    (1.0, {0: ULP / 2, 8: ULP / 2}, {"exact": 1 + ULP, "ampere": 1.0, "hopper": 1 + ULP}),
    (1.0, {k: ULP / 4 for k in range(4)}, {"exact": 1 + ULP, "ampere": 1.0, "hopper": 1 + ULP}),
    (1.0, {k: ULP / 8 for k in range(8)}, {"exact": 1 + ULP, "ampere": 1.0, "hopper": 1.0}),
    (1.0, {0: ULP, 1: ULP / 2}, {"exact": 1 + 2 * ULP, "ampere": 1 + ULP, "hopper": 1 + ULP}),
    (-1.0, {0: -ULP, 1: -ULP / 2}, {"exact": -1 - 2 * ULP, "ampere": -1 - ULP, "hopper": -1 - ULP}),
    (0.0, {0: 1.0, 1: -1.0, 2: ULP / 8}, {"exact": ULP / 8, "ampere": 0.0, "hopper": 0.0}),
]  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("core", emulation.TENSOR_CORES)
def test_known_sums(core, name, entries):
    for addend, products, sums in SUMS:
        a, b = torch.zeros(16, 16, dtype=TYPES[name]), torch.zeros(16, 8, dtype=TYPES[name])
        for k, product in products.items():
            power = math.frexp(abs(product))[1] - 1
            a[:, k], b[k] = product / 2.0 ** (power // 2), 2.0 ** (power // 2)
        with emulation.tensor_core(core):
            out = multiply(entries, name, a, b, torch.full((16, 8), addend))
        assert (out == sums[core]).all(), (addend, products, out[0, 0].item())


def random_operands(name: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers with a wide range of exponents, subnormal ones and zeros."""
    rng = generator(seed)

    def numbers(*shape: int) -> Tensor:
        spread = 4.0 if seed % 2 else 20.0
        exponents = torch.randn(shape, generator=rng) * spread / 4 - (seed % 3) * 4
        values = (torch.randn(shape, generator=rng) * exponents.exp2()).clamp(-1e4, 1e4)
        return values * (torch.rand(shape, generator=rng) < 0.9)

    a, b = numbers(16, 16), numbers(16, 8)
    return a.to(TYPES[name]), b.to(TYPES[name]), numbers(16, 8)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("core", GPUS)
def test_sums_are_those_of_the_published_model(core, name, entries):
    for seed in range(6):
        a, b, c = random_operands(name, seed)
        with emulation.tensor_core(core):
            out = multiply(entries, name, a, b, c)
        rows, columns = a.double().tolist(), b.T.double().tolist()
        expected = [
            [published(core, name, rows[i], columns[j], c[i, j].item()) for j in range(8)]
            for i in range(16)
        ]
        assert out.tolist() == expected


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("core", GPUS)
def test_special_values(core, name, entries):
    a, b = torch.zeros(16, 16, dtype=TYPES[name]), torch.ones(16, 8, dtype=TYPES[name])
    a[0, 3], a[1, 9], a[2, 0], a[2, 15] = math.nan, math.inf, math.inf, -math.inf
    c = torch.zeros(16, 8)
    c[3], c[4] = math.inf, -torch.finfo(torch.float32).max
    a[4, 1] = -1
    with emulation.tensor_core(core):
        out = multiply(entries, name, a, b, c)[:5, 0]
    assert out.isnan().tolist() == [True, False, True, False, False]
    assert out[[1, 3, 4]].tolist() == [math.inf, math.inf, c[4, 0].item()]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("core", GPUS)
def test_rows_are_independent_and_zeros_are_neutral(core, name, entries):
    with emulation.tensor_core(core):
        for seed in range(6):
            a, b, c = random_operands(name, seed)
            whole = multiply(entries, name, a, b, c)
            others = a.clone()
            others[torch.arange(16) != 5] = math.nan
            assert torch.equal(multiply(entries, name, others, b, c)[5], whole[5])
            # Keys that a row does not see have the weight zero, whatever is in their place.
            masked, changed = a.clone(), b.clone()
            masked[:, 6:10], changed[6:10] = 0, torch.finfo(TYPES[name]).max
            without = multiply(entries, name, masked, b, c)
            assert torch.equal(multiply(entries, name, masked, changed, c), without)
            assert torch.equal(multiply(entries, name, torch.zeros_like(a), changed, c), c)


@pytest.fixture(params=GPUS)
def gpu(request, monkeypatch) -> str:
    monkeypatch.setattr(_library, "native", emulation.EmulatedOps(tensor_core=request.param))
    monkeypatch.setattr(packed_head, "reads_panels", lambda _: False)
    return request.param


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_attention_of_a_node_depends_on_what_it_sees_alone(dtype, gpu):
    """Other rows, other nodes and the place of a node in its tree change no bit."""
    case = random_case(Shape(prefixes=(139, 3), nodes=11), dtype, seed=4)
    together = run(static_arguments(case))
    for row in range(2):
        alone = run(static_arguments(case.only_rows([row]), start=11, gap=0))
        assert torch.equal(alone[0], together[row])
        node = int(case.ancestors[row, :, 0].argmax())
        path = [i for i in range(11) if int(case.ancestors[row, node, 0]) >> i & 1]
        assert torch.equal(together[row, path], decode_path(case, row, node, 0, 0.0, "cpu"))


@pytest.mark.parametrize("weights", some_emulated(["same", "int8", "float8"], ["same"]))
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_the_draft_of_a_row_does_not_depend_on_the_others(dtype, weights, gpu):
    head = head_of("qk-norm-window", dtype=dtype, hidden_size=32)
    tokens, features = elements(head, 2, 3)
    counts, tree = torch.tensor([3, 1]), TreeConfig(2)
    together = OpRun.start(head, 2, weights=weights)
    drafted = together.draft(tree, tokens, features, counts)
    for row, count in enumerate(counts.tolist()):
        part = slice(row, row + 1)
        alone = OpRun.start(head, 1, weights=weights)
        own = alone.draft(tree, tokens[part, :count], features[part, :count])
        assert_equal_drafts([each[part] for each in drafted], own)
