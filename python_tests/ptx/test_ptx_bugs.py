"""Bugs planted in the PTX of kernels: what the compiler, or PTX that is written by hand, could get wrong.

Each bug is a change of nvcc's text. The table in docs/internals/ptx.md says which check catches which bug.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from helpers.drafters.head_cases import Run, elements, head_of
from helpers.ops import emulation
from helpers.ops.attention_cases import Shape, random_case, run, static_arguments
from helpers.ops.head_op_cases import STATIC, OpRun, assert_same_draft
from helpers.ops.op_cases import assert_same, random_parents
from helpers.ops.ptx_entries import compile_text, entry_of

from specdec_ext import ops
from specdec_ext.ops import _library, packed_head
from specdec_ext.reference.tree_attention import tree_attention as attention_reference
from specdec_ext.reference.tree_mask import tree_mask as mask_reference

pytestmark = [pytest.mark.emulated, pytest.mark.ptx]


def masks() -> None:
    parents, positions = random_parents(2, 64, seed=1), torch.tensor([0, 7])
    expected = mask_reference(parents, positions)
    assert_same(ops.tree_mask(parents, positions), expected, list(ops.TreeMask._fields))


def attends() -> None:
    case = random_case(Shape(prefixes=(130,), nodes=5), torch.bfloat16, seed=2)
    arguments = static_arguments(case)
    exact = attention_reference(**arguments).float()
    torch.testing.assert_close(run(arguments).float(), exact, rtol=0.02, atol=0.02)


def drafts() -> None:
    head = head_of("qk-norm-window")
    runs = OpRun.start(head, 2), Run.start(head, 2)
    assert_same_draft(*(each.draft(STATIC, *elements(head, 2, 3)) for each in runs))


@dataclass(frozen=True)
class Bug:
    """A change of one kernel.

    Attributes:
        replaced: expression for the changed text.
        message: what the check says.
        count: number of occurrences that are changed; 0 for all.
        device: the PTX that is changed.
    """

    file: str
    kernel: str
    replaced: str
    by: str
    check: Callable[[], None]
    message: str
    count: int = 1
    device: str = "ptx-sm_90"


MASK = ("tree/tree_mask", "tree_mask_kernel")
PREFIX = ("attention/tree_attention", "prefix_kernelINS_13AttentionTileI13__nv_bfloat16Li64EEELi1E")
FINISH = ("attention/tree_attention", "finish_kernelINS_13AttentionTileI13__nv_bfloat16Li64E")
DRAFT = ("draft_head/draft_head_float", "draft_head_kernel")
FRAGMENT = r"\{(%\w+), (%\w+), (%\w+), (%\w+)\}"
MMA = rf"(mma\.sync\S+\s+{FRAGMENT}, )\{{(%\w+), (%\w+), "
DIFFERS = "are not (equal|close)|differ"
BUGS = {
    "a missing barrier": Bug(*MASK, r"bar\.sync\s+0;", "", masks, "a race"),
    "a barrier that a thread skips": Bug(
        *MASK, r"bar\.sync\s+0;",
        "{ .reg .pred skips; setp.eq.u32 skips, %laneid, 9;\n@!skips bar.sync 0; }", masks, "a race|deadlock"
    ),
    "a wrong address in shared memory": Bug(
        *MASK, r"(st\.shared\.u32\s+\[%\w+)\]", r"\1+8192]", masks, "shared memory, which has 8192 bytes"
    ),
    "a misaligned store": Bug(
        *MASK, r"(st\.global\.u64\s+\[%\w+)\]", r"\1+4]", masks, "is not aligned to 8 bytes"
    ),
    "a missing store": Bug(*MASK, r"st\.global\.u64\s+\[%\w+\], %\w+;", "", masks, DIFFERS + "|expected"),
    "another layout of the parameters": Bug(
        *MASK, r"(_param_0\[)\d+", r"\g<1>104", masks, "parameter 0 has 104 bytes aligned to 8 for nvcc, 112"
    ),
    "swapped operands of mma": Bug(*PREFIX, MMA, r"\1{\7, \6, ", attends, DIFFERS),
    "rows of ldmatrix that are not transposed": Bug(
        *PREFIX, r"m8n8\.x4\.trans\.", "m8n8.x4.", attends, DIFFERS
    ),
    "a mask without the last lane": Bug(
        *PREFIX, r"(shfl\.sync\.bfly\.b32[^;]*), [-%\w]+;", r"\1, 0x7FFFFFFF;", attends,
        "which lane 31 does not belong|lane 31, which does not take part",
    ),
    "a shuffle over the wrong distance": Bug(
        *PREFIX, r"(shfl\.sync\.bfly\.b32\s+\S+ \S+ )%\w+,", r"\g<1>4,", attends, DIFFERS
    ),
    "a wait for too few copies": Bug(
        *PREFIX, r"cp\.async\.wait_group \d;", "cp.async.wait_group 9;", attends,
        "copies asynchronously.*nothing waited",
    ),
    "a copy of half a row": Bug(
        *PREFIX, r"(cp\.async\.cg\.shared\.global \[\S+\], \[\S+\], 16), %\w+;", r"\1, 8;", attends,
        "cp.async .*of 8 of 16 bytes",
    ),
    "a copy that is never committed": Bug(
        *PREFIX, r"cp\.async\.commit_group;", "", attends, "copies asynchronously.*nothing waited", 0
    ),
    "the wrong type of mma": Bug(
        *PREFIX, r"f32\.bf16\.bf16\.f32", "f32.f16.f16.f32", attends, DIFFERS, 0
    ),
    "swapped halves of a pair": Bug(
        *PREFIX, r"(cvt\.rn\.bf16x2\.f32 %\w+, )(%\w+), (%\w+);", r"\1\3, \2;", attends, DIFFERS
    ),
    "the wrong special register": Bug(
        *MASK, r"mov\.u32(\s+%\w+), %ctaid\.x;", r"mov.u32\1, %ctaid.y;", masks, DIFFERS + "|expected"
    ),
    "missing barriers of warps": Bug(*FINISH, r"bar\.warp\.sync[^;]*;", "", attends, "a race", 0),
    "a missing fence": Bug(
        *DRAFT, r"fence\.proxy\.async\.shared::cta;", "", drafts, "no fence.proxy.async follows", 0
    ),
    "a wait for other blocks without a fence": Bug(
        *DRAFT, r"fence\.acq_rel\.gpu;", "", drafts, "no thread_fence follows load_relaxed", 0
    ),
    "a copy that every lane begins": Bug(
        *DRAFT, r"elect\.sync _\|elected, 0xffffffff;", "setp.eq.u32 elected, 0, 0;", drafts,
        "a race|after all 1 arrivals", 0,
    ),
    "an mbarrier that expects too few bytes": Bug(
        *DRAFT, r"(mbarrier\.arrive\.expect_tx\S+ _, \[%\w+\], )%\w+;", r"\g<1>16;", drafts,
        "bytes more than mbarrier_arrive_expect announced", 0,
    ),
    "a bulk copy of too few bytes": Bug(
        *DRAFT, r"(cp\.async\.bulk\S+ \[%\w+\], \[%\w+\], )%\w+,", r"\g<1>64,", drafts,
        r"deadlock.*waits for [1-9]\d* bytes", 0,
    ),
    "an mbarrier that expects too few arrivals": Bug(
        *DRAFT, r"(mbarrier\.init\.shared\.b64 \[%\w+\], )(%\w+);", r"\g<1>1;", drafts,
        "a race|deadlock|after all 1 arrivals|copies asynchronously", 0,
    ),
    "weights that are used before they have landed": Bug(
        *DRAFT, r"cp\.async\.wait_group \d;", "cp.async.wait_group 9;", drafts,
        "copies asynchronously.*nothing waited", 0, "ptx-sm_80",
    ),
    "weights that are announced before all lanes have copied": Bug(
        *DRAFT, r"bar\.warp\.sync[^;]*;", "", drafts, "a race|copies asynchronously", 0, "ptx-sm_80"
    ),
    "an mbarrier that waits for the other phase": Bug(
        *DRAFT, r"(mbarrier\.try_wait\.parity\.shared\.b64 \w+, \[%\w+\], )(%\w+);", r"\g<1>1;", drafts,
        "a race|copies asynchronously|deadlock", 0,
    ),
}  # fmt: skip


@pytest.fixture(params=BUGS)
def planted(request, tmp_path, monkeypatch) -> Bug:
    if not emulation.has_ptx():
        pytest.skip("PTX needs nvcc, which the build has not found")
    bug = BUGS[request.param]
    target = bug.device
    text = entry_of((emulation.BUILD / target / f"{bug.file}.ptx").read_text(), bug.kernel)
    changed, count = re.subn(bug.replaced, bug.by, text, count=bug.count)
    assert count > 0
    compile_text(changed, tmp_path, optimise=False)
    entries = emulation.BUILD / f"lib{target}.so", tmp_path / "libentries.so"
    changed_ops = emulation.EmulatedOps(*entries)
    monkeypatch.setattr(_library, "native", changed_ops)
    monkeypatch.setattr(packed_head, "reads_panels", lambda _: False)
    return bug


def test_is_caught(planted):
    with pytest.raises((RuntimeError, AssertionError), match=planted.message):
        planted.check()


@pytest.mark.parametrize("check", [masks, attends, drafts])
@pytest.mark.parametrize("device", emulation.PTX, indirect=True)
def test_kernels_without_a_bug_pass(check, device):
    check()


@pytest.mark.parametrize("device", emulation.PTX, indirect=True)
def test_attention_tolerates_the_error_of_approximate_exponentials(device):
    """The error of ex2.approx is at most two units in the last place."""
    case = random_case(Shape(prefixes=(130, 3), nodes=5), torch.float16, seed=2)
    arguments = static_arguments(case)
    exact = run(arguments)
    for units in (1, 2):
        with emulation.approximation_error(units):
            torch.testing.assert_close(run(arguments), exact, rtol=2e-3, atol=1e-4)
    with emulation.approximation_error(2**16):
        assert not torch.equal(run(arguments), exact)
