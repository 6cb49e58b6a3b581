"""What translated PTX instructions compute, by class of opcode, against literal results of the PTX ISA."""

from __future__ import annotations

import ctypes
import math
import re
import struct

import pytest
import torch
from helpers.ops import emulation
from helpers.ops.ptx_entries import HEADER, compile_text, launch

from build_support.ptx.cpp import translate
from build_support.ptx.syntax import PtxError

pytestmark = pytest.mark.emulated


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


NAN, INF, ONE, HALF = 0x7FC00000, bits(math.inf), bits(1.0), bits(0.5)
MINUS = 2**64

# Instruction, three operands and the result. The operands are in %rd1 to %rd3, their lower bits in %r1 to %r3
# and %rs1 to %rs3, and %p1 to %p3 say whether they are not zero. The result is that of register 0.
CASES = [
    # integers
    ("add.s32 %r0, %r1, %r2", 0xFFFFFFFF, 2, 0, 1),
    ("add.s64 %rd0, %rd1, -3", 1, 0, 0, MINUS - 2),
    ("add.s16 %rs0, %rs1, %rs2", 0xFFFF, 2, 0, 1),
    ("sub.s32 %r0, %r1, %r2", 1, 2, 0, 0xFFFFFFFF),
    ("neg.s32 %r0, %r1", 1, 0, 0, 0xFFFFFFFF),
    ("abs.s32 %r0, %r1", 0xFFFFFFFE, 0, 0, 2),
    ("mul.lo.s32 %r0, %r1, %r2", 0x80000001, 3, 0, 0x80000003),
    ("mul.lo.s16 %rs0, %rs1, %rs2", 0xFFFF, 0xFFFF, 0, 1),
    ("mul.wide.s32 %rd0, %r1, %r2", 0xFFFFFFFF, 2, 0, MINUS - 2),
    ("mul.wide.u32 %rd0, %r1, %r2", 0xFFFFFFFF, 2, 0, 0x1FFFFFFFE),
    ("mul.wide.s16 %r0, %rs1, %rs2", 0xFFFF, 3, 0, 0xFFFFFFFD),
    ("mul.hi.s32 %r0, %r1, %r2", 0xFFFFFFFF, 2, 0, 0xFFFFFFFF),
    ("mul.hi.u64 %rd0, %rd1, %rd2", 2**63, 6, 0, 3),
    ("mad.lo.s32 %r0, %r1, %r2, %r3", 3, 5, 0xFFFFFFFF, 14),
    ("mad.wide.s32 %rd0, %r1, %r2, %rd3", 0xFFFFFFFF, 5, 6, 1),
    ("div.s32 %r0, %r1, %r2", 0xFFFFFFF9, 2, 0, 0xFFFFFFFD),
    ("div.u32 %r0, %r1, %r2", 0xFFFFFFF9, 2, 0, 0x7FFFFFFC),
    ("div.s32 %r0, %r1, %r2", 0x80000000, 0xFFFFFFFF, 0, 0x80000000),
    ("div.u32 %r0, %r1, %r2", 7, 0, 0, 0xFFFFFFFF),
    ("rem.s32 %r0, %r1, %r2", 0xFFFFFFF9, 2, 0, 0xFFFFFFFF),
    ("min.s32 %r0, %r1, %r2", 0xFFFFFFFF, 2, 0, 0xFFFFFFFF),
    ("min.u32 %r0, %r1, %r2", 0xFFFFFFFF, 2, 0, 2),
    ("max.s64 %rd0, %rd1, %rd2", MINUS - 1, 2, 0, 2),
    # bits
    ("and.b32 %r0, %r1, %r2", 12, 10, 0, 8),
    ("or.b64 %rd0, %rd1, %rd2", 2**63, 1, 0, 2**63 + 1),
    ("xor.b16 %rs0, %rs1, 0xFF", 0x1234, 0, 0, 0x12CB),
    ("not.b32 %r0, %r1", 0, 0, 0, 0xFFFFFFFF),
    ("shl.b32 %r0, %r1, %r2", 3, 31, 0, 0x80000000),
    ("shl.b32 %r0, %r1, %r2", 3, 32, 0, 0),
    ("shr.u32 %r0, %r1, %r2", 0x80000000, 33, 0, 0),
    ("shr.s32 %r0, %r1, %r2", 0x80000000, 33, 0, 0xFFFFFFFF),
    ("shr.s64 %rd0, %rd1, %r2", MINUS - 4, 1, 0, MINUS - 2),
    ("popc.b64 %r0, %rd1", MINUS - 1, 0, 0, 64),
    ("clz.b32 %r0, %r1", 1, 0, 0, 31),
    ("brev.b32 %r0, %r1", 1, 0, 0, 0x80000000),
    ("bfind.shiftamt.u32 %r0, %r1", 0x10, 0, 0, 27),
    ("bfind.shiftamt.u32 %r0, %r1", 0, 0, 0, 0xFFFFFFFF),
    ("bfi.b32 %r0, %r1, %r2, 8, 8", 0xAB, 0x11223344, 0, 0x1122AB44),
    ("bfi.b64 %rd0, %rd1, %rd2, 32, 32", 5, 7, 0, 0x500000007),
    ("prmt.b32 %r0, %r1, %r2, 0x7610", 0x33221100, 0x77665544, 0, 0x77661100),
    ("prmt.b32 %r0, %r1, 0, 0x9", 0x8000, 0, 0, 0x000000FF),
    # moves, selections, comparisons
    ("mov.b64 %rd0, {%r1, %r2}", 1, 2, 0, 0x200000001),
    ("mov.b32 {%rs4, %rs0}, %r1", 0x12345678, 0, 0, 0x1234),
    ("selp.b32 %r0, %r1, %r2, %p3", 5, 6, 1, 5),
    ("selp.f32 %r0, 0f3F800000, 0f00000000, %p3", 5, 6, 0, 0),
    ("setp.lt.s32 %p0, %r1, %r2", 0xFFFFFFFF, 0, 0, 1),
    ("setp.lt.u32 %p0, %r1, %r2", 0xFFFFFFFF, 0, 0, 0),
    ("setp.ne.s16 %p0, %rs1, %rs2", 0x10005, 5, 0, 0),
    ("setp.lt.f32 %p0, %r1, %r2", NAN, ONE, 0, 0),
    ("setp.ltu.f32 %p0, %r1, %r2", NAN, ONE, 0, 1),
    ("setp.ne.f32 %p0, %r1, %r2", NAN, ONE, 0, 0),
    ("setp.neu.f32 %p0, %r1, %r2", NAN, ONE, 0, 1),
    ("setp.num.f32 %p0, %r1, %r2", HALF, ONE, 0, 1),
    ("setp.nan.f32 %p0, %r1, %r2", HALF, NAN, 0, 1),
    ("and.pred %p0, %p1, %p2", 1, 0, 0, 0),
    ("or.pred %p0, %p1, %p2", 1, 0, 0, 1),
    ("xor.pred %p0, %p1, %p2", 1, 1, 0, 0),
    ("not.pred %p0, %p1", 0, 0, 0, 1),
    ("@%p1 mov.u32 %r0, 7", 1, 0, 0, 7),
    ("mov.u32 %r0, 3; @!%p1 mov.u32 %r0, 7", 1, 0, 0, 3),
    # float32
    ("add.rn.f32 %r0, %r1, %r2", ONE, HALF, 0, bits(1.5)),
    ("sub.f32 %r0, %r1, %r2", ONE, HALF, 0, HALF),
    ("mul.rn.f32 %r0, %r1, %r2", bits(1 + 2**-23), bits(1 + 2**-23), 0, bits(1 + 2**-22)),
    (
        "fma.rn.f32 %r0, %r1, %r2, %r3",
        bits(1 + 2**-23),
        bits(1 + 2**-23),
        bits(-1 - 2**-22),
        bits(2**-46),
    ),
    ("div.rn.f32 %r0, %r1, %r2", ONE, bits(3.0), 0, 0x3EAAAAAB),
    ("sqrt.rn.f32 %r0, %r1", bits(2.0), 0, 0, 0x3FB504F3),
    ("neg.f32 %r0, %r1", ONE, 0, 0, bits(-1.0)),
    ("abs.f32 %r0, %r1", bits(-1.0), 0, 0, ONE),
    ("min.f32 %r0, %r1, %r2", NAN, ONE, 0, ONE),
    ("max.f32 %r0, %r1, %r2", bits(-0.0), 0, 0, 0),
    ("min.f32 %r0, %r1, %r2", 0, bits(-0.0), 0, bits(-0.0)),
    ("max.NaN.f32 %r0, %r1, %r2", ONE, NAN, 0, 0x7FFFFFFF),
    ("ex2.approx.f32 %r0, %r1", bits(3.0), 0, 0, bits(8.0)),
    ("lg2.approx.f32 %r0, %r1", bits(8.0), 0, 0, bits(3.0)),
    # conversions
    ("cvt.u64.u32 %rd0, %r1", MINUS - 1, 0, 0, 0xFFFFFFFF),
    ("cvt.s64.s32 %rd0, %r1", 0xFFFFFFFF, 0, 0, MINUS - 1),
    ("cvt.s32.s8 %r0, %r1", 0x180, 0, 0, 0xFFFFFF80),
    ("cvt.u16.u32 %rs0, %r1", 0x12345, 0, 0, 0x2345),
    ("cvt.rn.f32.s32 %r0, %r1", 0xFFFFFFFF, 0, 0, bits(-1.0)),
    ("cvt.rn.f32.u32 %r0, %r1", 0x1000001, 0, 0, bits(2.0**24)),
    ("cvt.rzi.u64.f32 %rd0, %r1", bits(2.75), 0, 0, 2),
    ("cvt.rzi.s32.f32 %r0, %r1", bits(1e20), 0, 0, 0x7FFFFFFF),
    ("cvt.rzi.u32.f32 %r0, %r1", NAN, 0, 0, 0),
    ("cvt.rn.f16x2.f32 %r0, %r1, %r2", ONE, bits(2.0), 0, 0x3C004000),
    ("cvt.rn.bf16x2.f32 %r0, %r1, %r2", ONE, INF, 0, 0x3F807F80),
    ("cvt.rn.bf16.f32 %rs0, %r1", 0x3F808000, 0, 0, 0x3F80),
    ("cvt.f32.f16 %r0, %rs1", 1, 0, 0, bits(2.0**-24)),
    ("cvt.f32.bf16 %r0, %rs1", 0x3F80, 0, 0, ONE),
]

REGISTERS = """.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<19>; .reg .b64 %rd<19>;
    ld.param.u64 %rd10, [in]; ld.param.u64 %rd11, [out];
    cvta.to.global.u64 %rd10, %rd10;
    mov.u32 %r10, %tid.x;
    mul.wide.u32 %rd12, %r10, 8;
    add.s64 %rd11, %rd11, %rd12;
"""
INPUTS = "".join(
    f"ld.global.u64 %rd{i}, [%rd10+{8 * i - 8}]; cvt.u32.u64 %r{i}, %rd{i}; cvt.u16.u64 %rs{i}, %rd{i};"
    f"setp.ne.s64 %p{i}, %rd{i}, 0;\n"
    for i in (1, 2, 3)
)
RESULT = {
    "%rd0": "",
    "%r0": "cvt.u64.u32 %rd0, %r0;",
    "%rs0": "cvt.u64.u16 %rd0, %rs0;",
    "%p0": "selp.u64 %rd0, 1, 0, %p0;",
}
SHARED = ".shared .align 8 .b8 words[256];\n"


def entry(name: str, body: str) -> str:
    """An entry with the registers above; it ends with %rd0 in out[thread]."""
    return (
        f".visible .entry {name}(.param .u64 in, .param .u64 out)\n{{\n{REGISTERS}{body}\n"
        "st.global.u64 [%rd11], %rd0;\nret;\n}\n"
    )


def case_entry(number: int, instruction: str) -> str:
    register = next(each for each in RESULT if re.search(rf"{each}\b", instruction))
    return entry(f"case_{number}", f"{INPUTS}{instruction};\n{RESULT[register]}")


# Bodies for 32 threads, and the result of each. %r10 is the thread, and in[i] = 100 + i.
MEMORY = "shl.b32 %r11, %r10, 2; st.shared.u32 [words+128], %r10; add.s32 %r12, %r11, words;\n"
BODIES = {
    "shuffle_index": ("shfl.sync.idx.b32 %r0, %r10, 5, 31, -1;", lambda i: 5),
    "shuffle_in_segments": ("shfl.sync.idx.b32 %r0, %r10, 1, 0x1C03, -1;", lambda i: i // 4 * 4 + 1),
    "shuffle_xor": ("shfl.sync.bfly.b32 %r0, %r10, 3, 31, -1;", lambda i: i ^ 3),
    "shuffle_up": ("shfl.sync.up.b32 %r0|%p1, %r10, 3, 0, -1; @!%p1 mov.u32 %r0, 99;",
        lambda i: i - 3 if i >= 3 else 99),
    "shuffle_down": ("shfl.sync.down.b32 %r0|%p1, %r10, 3, 31, -1; @!%p1 mov.u32 %r0, 99;",
        lambda i: i + 3 if i < 29 else 99),
    "ballot": ("and.b32 %r11, %r10, 1; setp.eq.s32 %p1, %r11, 1; vote.sync.ballot.b32 %r0, %p1, -1;",
        lambda i: 0xAAAAAAAA),
    "any": ("setp.eq.s32 %p1, %r10, 7; vote.sync.any.pred %p2, %p1, -1; selp.u32 %r0, 1, 0, %p2;",
        lambda i: 1),
    "all": ("setp.eq.s32 %p1, %r10, 7; vote.sync.all.pred %p2, %p1, -1; selp.u32 %r0, 1, 0, %p2;",
        lambda i: 0),
    "elect": ("elect.sync _|%p1, -1; selp.u32 %r0, 1, 0, %p1;", lambda i: i == 0),
    "sum": ("redux.sync.add.u32 %r0, %r10, -1;", lambda i: 496),
    "smallest": ("sub.s32 %r11, %r10, 5; redux.sync.min.s32 %r0, %r11, -1;", lambda i: 2**32 - 5),
    "largest": ("sub.s32 %r11, %r10, 5; redux.sync.max.u32 %r0, %r11, -1;", lambda i: 2**32 - 1),
    "branch": ("mov.u32 %r0, 0;\n$loop: add.s32 %r0, %r0, 2; setp.lt.s32 %p1, %r0, %r10;\n@%p1 bra $loop;",
        lambda i: max(2, i + i % 2)),
    "scopes": ("{ .reg .b32 own; mov.u32 own, 4;\nmov.u32 %r0, own; }\n"
        "{ .reg .b64 own; mov.u64 own, 5; cvt.u32.u64 %r1, own; }\nadd.s32 %r0, %r0, %r1;", lambda i: 9),
    "shared": (SHARED + "shl.b32 %r11, %r10, 2; mov.u32 %r12, words; add.s32 %r13, %r12, %r11;\n"
        "st.shared.u32 [%r13+128], %r10; bar.sync 0; ld.shared.u32 %r0, [words+132];", lambda i: 1),
    "vectors": (SHARED + "mov.u32 %r12, words; shl.b32 %r11, %r10, 3; add.s32 %r12, %r12, %r11;\n"
        "st.shared.v2.u32 [%r12], {%r10, 7}; ld.shared.v2.u32 {%r1, %r2}, [%r12];\n"
        "add.s32 %r0, %r1, %r2;", lambda i: i + 7),
    "bytes": (SHARED + "mov.u32 %r12, words; shl.b32 %r11, %r10, 2; add.s32 %r12, %r12, %r11;\n"
        "st.shared.u32 [%r12], 0x80FF0102; ld.shared.v4.u8 {%rs1, %rs2, %rs3, %rs4}, [%r12];\n"
        "ld.shared.s8 %r1, [%r12+3]; cvt.u32.u16 %r0, %rs3; add.s32 %r0, %r0, %r1;", lambda i: 255 - 128),
    "parameters": ("mov.b64 %rd5, in; mul.wide.u32 %rd6, %r10, 0; add.s64 %rd5, %rd5, %rd6;\n"
        "ld.param.u64 %rd7, [%rd5+0]; mov.b64 %rd8, in; cvta.param.u64 %rd8, %rd8; ld.u64 %rd9, [%rd8];\n"
        "setp.eq.s64 %p1, %rd7, %rd9; selp.u32 %r0, 1, 0, %p1;", lambda i: 1),
    "generic": (SHARED + "mov.u64 %rd5, words; cvta.shared.u64 %rd6, %rd5; add.s64 %rd6, %rd6, %rd12;\n"
        "st.u32 [%rd6], %r10; cvta.to.shared.u64 %rd7, %rd6; cvt.u32.u64 %r12, %rd7;\n"
        "ld.shared.u32 %r0, [%r12];", lambda i: i),
    "atomics": (SHARED + "setp.ne.s32 %p1, %r10, 0; @!%p1 st.shared.u64 [words], 0; bar.warp.sync -1;\n"
        "mov.u32 %r12, words; atom.shared.add.u32 %r1, [%r12], 2; atom.shared.max.s32 %r1, [%r12+4], %r10;\n"
        "bar.sync 0; ld.shared.v2.u32 {%r0, %r1}, [words]; add.s32 %r0, %r0, %r1;", lambda i: 95),
    "exchange": ("add.s64 %rd5, %rd10, %rd12; cvt.u64.u32 %rd6, %r10; add.s64 %rd7, %rd6, 100;\n"
        "atom.global.cas.b64 %rd1, [%rd5], %rd7, 55; ld.global.u64 %rd2, [%rd5]; cvt.u32.u64 %r1, %rd1;\n"
        "cvt.u32.u64 %r2, %rd2; add.s32 %r0, %r1, %r2; st.global.u64 [%rd5], %rd1;", lambda i: 155 + i),
    "copies": (SHARED + "and.b32 %r1, %r10, 1; shl.b32 %r11, %r10, 3; mov.u32 %r12, words;\n"
        "setp.eq.s32 %p1, %r1, 0; add.s64 %rd5, %rd10, %rd12; add.s32 %r13, %r12, %r11;\n"
        "@%p1 cp.async.cg.shared.global [%r13], [%rd5], 16, 16;\ncp.async.commit_group;\n"
        "cp.async.wait_group 0; bar.warp.sync -1; ld.shared.u64 %rd1, [%r13];\n"
        "cvt.u32.u64 %r0, %rd1;", lambda i: 100 + i),
    "no_copies": (SHARED + "mov.u32 %r12, words; setp.eq.s32 %p1, %r10, 0; mov.u32 %r1, 0;\n"
        "@%p1 cp.async.cg.shared.global [%r12], [%rd10], 16, %r1;\ncp.async.wait_all;\n"
        "bar.sync 0; ld.shared.u32 %r0, [%r12];", lambda i: 0),
    "bulk": (SHARED + "setp.ne.s32 %p1, %r10, 0; mov.u32 %r12, words; mov.u32 %r13, 128; @%p1 bra $wait;\n"
        "mbarrier.init.shared.b64 [words+128], 1; fence.proxy.async.shared::cta;\n"
        "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%r13], 64; }\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12], [%rd10], 64, [%r13];\n"
        "$wait: bar.warp.sync -1; mbarrier.try_wait.parity.shared.b64 %p2, [%r13], 0;\n"
        "ld.shared.u32 %r0, [words+56];", lambda i: 107),
    "grid": ("setp.ne.s32 %p1, %r10, 0; @%p1 bra $read; st.global.u64 [%rd10], 77;\n"
        "st.release.gpu.b64 [%rd10+8], 1;\n"
        "$read: { .reg .b64 flag; ld.acquire.gpu.b64 flag, [%rd10+8]; setp.ne.s64 %p2, flag, 1; }\n"
        "@%p2 bra $read; ld.global.u32 %r0, [%rd10];", lambda i: 77),
    "grid_relaxed": ("setp.ne.s32 %p1, %r10, 0; @%p1 bra $read; st.global.u64 [%rd10], 77;\n"
        "st.release.gpu.b64 [%rd10+8], 1;\n"
        "$read: { .reg .b64 flag; ld.relaxed.gpu.b64 flag, [%rd10+8]; setp.ne.s64 %p2, flag, 1; }\n"
        "@%p2 bra $read; fence.acq_rel.gpu; ld.global.u32 %r0, [%rd10];", lambda i: 77),
}  # fmt: skip


@pytest.fixture(scope="module")
def entries(tmp_path_factory) -> ctypes.CDLL:
    texts = [case_entry(number, case[0]) for number, case in enumerate(CASES)]
    for name, (body, _) in BODIES.items():
        texts.append(entry(name, body + "\ncvt.u64.u32 %rd0, %r0;"))
    return compile_text(HEADER + "".join(texts), tmp_path_factory.mktemp("ptx"))


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_one_thread(number, entries):
    *operands, expected = CASES[number][1:]
    inputs = torch.tensor([each - 2**64 if each >= 2**63 else each for each in operands])
    result = torch.zeros(1, dtype=torch.int64)
    assert launch(entries, f"case_{number}", inputs, result, threads=1) is None
    assert result.item() % 2**64 == expected, hex(result.item() % 2**64)


@pytest.mark.parametrize("name", BODIES)
def test_a_warp(name, entries):
    inputs, result = torch.arange(100, 164), torch.zeros(32, dtype=torch.int64)
    message = launch(entries, name, inputs, result)
    assert message is None, message
    assert result.tolist() == [int(BODIES[name][1](thread)) for thread in range(32)]


def test_approximate_results_can_be_wrong_by_a_unit_in_the_last_place(entries):
    """But not where they are exact on the hardware."""
    number = next(i for i, case in enumerate(CASES) if case[0].startswith("ex2"))
    changes = {}
    for exponent in (0.0, 0.25, 0.5, 0.75, -200.0):
        results = []
        for units in (0, 1):
            result = torch.zeros(1, dtype=torch.int64)
            with emulation.approximation_error(units):
                inputs = torch.tensor([bits(exponent), 0, 0])
                assert launch(entries, f"case_{number}", inputs, result, threads=1) is None
            results.append(result.item())
        changes[exponent] = abs(results[1] - results[0])
    assert changes == {0.0: 0, 0.25: 1, 0.5: 1, 0.75: 1, -200.0: 0}


def one_entry(body: str) -> str:
    return HEADER + entry("wrong", body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "ret;\nsin.approx.f32 %r0, %r1;",
            r"^kernel\.ptx:13: no rule for .* sin\.approx\.f32; add",
        ),
        ("add.s32 %r0, %r99, %r2;", r"^kernel\.ptx:12: add\.s32 has operands .*: %r0, %r99, %r2$"),
        ("add.s32 %r0, %r1;", r"^kernel\.ptx:12: add\.s32 has operands .*: %r0, %r1$"),
        ("mov.u32 %r0, %clock;", r"^kernel\.ptx:12: mov\.u32 has operands .*%clock"),
        (
            ".local .align 8 .b8 depot[16];",
            r"^kernel\.ptx:12: the directive \.local is not translated",
        ),
    ],
)
def test_error_names_instruction_file_and_line(body, message):
    with pytest.raises(PtxError, match=message):
        translate(one_entry(body), "kernel.ptx")


def test_error_for_variables_of_a_module():
    with pytest.raises(PtxError, match=r"kernel\.ptx:4: the directive \.global is not translated"):
        translate(HEADER + ".global .align 4 .b8 table[64];\n" + entry("a", ""), "kernel.ptx")
