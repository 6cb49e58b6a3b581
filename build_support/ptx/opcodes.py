"""What each PTX instruction does, as C++: the table of the translator.

A rule is an opcode and a C++ statement. In the opcode, ``{I}`` stands for the types of its group below, and
``[.rn]`` is optional. In the statement, ``$1:s32`` is the operand 1, read as s32, and ``{I}`` the type that
the opcode has; ``{U}`` is the unsigned type of that size and ``{B}`` the untyped one.
A statement that begins with ``$0:s32 =`` writes the destination. Further forms of an operand:

- ``$1:address``: a memory operand as a number;
- ``$1:f32[4]``: the vector {a, b, c, d} as an array;
- ``$0:b32|pred``: two destinations, of which each may be absent; the value is a pair;
- ``$3:u32?16``: an operand that may be absent, and then counts as 16.

``t`` is the thread (csrc/testing/emulation/ptx/thread.h), and functions without a prefix are in
csrc/testing/emulation/ptx/arithmetic.h. Rules that use ``t`` can wait for other threads or report an error.
"""

from __future__ import annotations

import re
from functools import cache

GROUPS = {
    "I": r"[us](?:16|32|64)",  # integers
    "D": r"[us](?:8|16|32|64)",  # integers, as destination and source of a conversion
    "S": r"[us](?:8|16|32|64)",
    "T": r"[bus](?:16|32|64)|f32",  # anything in a register
    "L": r"[bus](?:8|16|32|64)|f32",  # anything in memory
    "N": r"[24]",  # elements of a vector
    "A": r"[us](?:32|64)|b(?:32|64)",  # atomic operands
    "X": r"b(?:16|32|64)",  # bits
    "R": r"[us]32",
    "H": r"f16|bf16",
}

COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SPACES = {".global": "kGlobal", ".global.nc": "kGlobal", ".shared": "kShared", "": "kGeneric"}
ATOMICS = {
    "add": "old + $2:{A}",
    "min": "old < $2:{A} ? old : $2:{A}",
    "max": "old > $2:{A} ? old : $2:{A}",
    "and": "old & $2:{A}",
    "or": "old | $2:{A}",
    "exch": "$2:{A}",
    "cas": "old == $2:{A} ? $3:{A} : old",
}

RULES = {
    # Moves.
    "mov.{T}": "$0:{B} = $1:{B}",
    "mov.pred": "$0:pred = $1:pred",
    "cvta[.to].global.u64": "$0:u64 = $1:u64",
    "cvta.param.u64": "$0:u64 = t.param_address($1:u64)",
    "cvta.shared.u64": "$0:u64 = t.generic_address($1:u64)",
    "cvta.to.shared.u64": "$0:u64 = t.shared_address($1:u64)",
    "selp.{T}": "$0:{B} = $3:pred ? $1:{B} : $2:{B}",
    # Integers; they wrap around.
    "add.{I}": "$0:{U} = $1:{U} + $2:{U}",
    "sub.{I}": "$0:{U} = $1:{U} - $2:{U}",
    "neg.{I}": "$0:{U} = -$1:{U}",
    "abs.{I}": "$0:{U} = $1:{I} < 0 ? -$1:{U} : $1:{U}",
    "mul.lo.{I}": "$0:{U} = multiply($1:{U}, $2:{U})",
    "mul.wide.{I}": "$0:{W} = multiply_wide($1:{I}, $2:{I})",
    "mul.hi.{I}": "$0:{I} = multiply_high($1:{I}, $2:{I})",
    "mad.lo.{I}": "$0:{U} = multiply($1:{U}, $2:{U}) + $3:{U}",
    "mad.wide.{I}": "$0:{W} = multiply_wide($1:{I}, $2:{I}) + $3:{W}",
    "div.{I}": "$0:{I} = divide($1:{I}, $2:{I})",
    "rem.{I}": "$0:{I} = remainder($1:{I}, $2:{I})",
    "min.{I}": "$0:{I} = $1:{I} < $2:{I} ? $1:{I} : $2:{I}",
    "max.{I}": "$0:{I} = $1:{I} > $2:{I} ? $1:{I} : $2:{I}",
    # Bits.
    "and.{X}": "$0:{X} = $1:{X} & $2:{X}",
    "or.{X}": "$0:{X} = $1:{X} | $2:{X}",
    "xor.{X}": "$0:{X} = $1:{X} ^ $2:{X}",
    "not.{X}": "$0:{X} = ~$1:{X}",
    "and.pred": "$0:pred = $1:pred & $2:pred",
    "or.pred": "$0:pred = $1:pred | $2:pred",
    "xor.pred": "$0:pred = $1:pred ^ $2:pred",
    "not.pred": "$0:pred = !$1:pred",
    "shl.{X}": "$0:{X} = shift_left($1:{X}, $2:u32)",
    "shr.{T}": "$0:{T} = shift_right($1:{T}, $2:u32)",
    "popc.{X}": "$0:u32 = popcount($1:{X})",
    "clz.{X}": "$0:u32 = leading_zeros($1:{X})",
    "brev.b32": "$0:b32 = reverse_bits($1:b32)",
    "bfind.shiftamt.u32": "$0:u32 = $1:u32 == 0 ? 0xFFFFFFFF : leading_zeros($1:u32)",
    "bfi.{X}": "$0:{X} = insert_bits($1:{X}, $2:{X}, $3:u32, $4:u32)",
    "prmt.b32": "$0:b32 = permute_bytes($1:b32, $2:b32, $3:b32)",
    # float32. Every operation is rounded to nearest even; the compiler must not contract them.
    "add[.rn].f32": "$0:f32 = $1:f32 + $2:f32",
    "sub[.rn].f32": "$0:f32 = $1:f32 - $2:f32",
    "mul[.rn].f32": "$0:f32 = $1:f32 * $2:f32",
    "div.rn.f32": "$0:f32 = $1:f32 / $2:f32",
    "fma.rn.f32": "$0:f32 = __builtin_fmaf($1:f32, $2:f32, $3:f32)",
    "sqrt.rn.f32": "$0:f32 = __builtin_sqrtf($1:f32)",
    "neg.f32": "$0:f32 = -$1:f32",
    "abs.f32": "$0:f32 = __builtin_fabsf($1:f32)",
    "min.f32": "$0:f32 = minimum($1:f32, $2:f32)",
    "max.f32": "$0:f32 = maximum($1:f32, $2:f32)",
    "max.NaN.f32": "$0:f32 = maximum_or_nan($1:f32, $2:f32)",
    "ex2.approx.f32": "$0:f32 = t.approximate(__builtin_exp2f($1:f32))",
    "lg2.approx.f32": "$0:f32 = t.approximate(__builtin_log2f($1:f32))",
    # Conversions.
    "cvt.{D}.{S}": "$0:{D} = $1:{S}",
    "cvt.rn.f32.{I}": "$0:f32 = float($1:{I})",
    "cvt.rzi.{I}.f32": "$0:{I} = truncate<{I:c}>($1:f32)",
    "cvt.f32.{H}": "$0:f32 = from_{H}($1:b16)",
    "cvt.rn.{H}.f32": "$0:b16 = to_{H}($1:f32)",
    "cvt.rn.{H}x2.f32": "$0:b32 = to_{H}($2:f32) | uint32_t{to_{H}($1:f32)} << 16",
    # Control. `bra` and `ret` are statements of their own.
    "trap": "t.trap()",
    "bar.warp.sync": "t.warp_barrier($0:b32)",
    "(bar|barrier).sync[.aligned]": "t.barrier($0:u32, $1:u32?0)",
    "(membar.gl|fence.acq_rel.gpu|fence.sc.gpu)": "t.fence()",
    "fence.proxy.async.shared::cta": "t.proxy_fence()",
    # Lanes of a warp.
    "shfl.sync.idx.b32": "$0:b32|pred = t.shuffle_index($1:b32, $2:b32, $3:b32, $4:b32)",
    "shfl.sync.bfly.b32": "$0:b32|pred = t.shuffle_xor($1:b32, $2:b32, $3:b32, $4:b32)",
    "shfl.sync.up.b32": "$0:b32|pred = t.shuffle_up($1:b32, $2:b32, $3:b32, $4:b32)",
    "shfl.sync.down.b32": "$0:b32|pred = t.shuffle_down($1:b32, $2:b32, $3:b32, $4:b32)",
    "vote.sync.ballot.b32": "$0:b32 = t.vote($1:pred, $2:b32)",
    "vote.sync.any.pred": "$0:pred = t.vote($1:pred, $2:b32) != 0",
    "vote.sync.all.pred": "$0:pred = t.vote(!$1:pred, $2:b32) == 0",
    "elect.sync": "$0:b32|pred = t.elect($1:b32)",
    "redux.sync.add.{R}": "$0:u32 = t.reduce($1:u32, $2:b32, &sum_of<{R:c}>)",
    "redux.sync.min.{R}": "$0:u32 = t.reduce($1:u32, $2:b32, &minimum_of<{R:c}>)",
    "redux.sync.max.{R}": "$0:u32 = t.reduce($1:u32, $2:b32, &maximum_of<{R:c}>)",
    # Memory.
    "ld.param.{L}": "$0:{L} = t.param<{L:c}>($1:address)",
    "ld.param.v{N}.{L}": "$0:{L}[{N}] = t.param<std::array<{L:c}, {N}>>($1:address)",
    "ld.acquire.gpu[.global].{A}": "$0:{A} = t.load_atomic<{A:c}>($1:address, kAcquireRelease)",
    "ld.relaxed.gpu[.global].{A}": "$0:{A} = t.load_atomic<{A:c}>($1:address, kRelaxed)",
    "st.release.gpu[.global].{A}": "t.store_release<{A:c}>($0:address, $1:{A})",
    # Asynchronous copies.
    "cp.async.(cg|ca).shared.global": "t.copy($0:address, $1:address, $2:u32, $3:u32?16)",
    "cp.async.commit_group": "t.commit_copies()",
    "cp.async.wait_group": "t.wait_copies($0:u32)",
    "cp.async.wait_all": "t.commit_copies(), t.wait_copies(0)",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": (
        "t.bulk_copy($0:address, $1:address, $2:u32, $3:address)"
    ),
    "mbarrier.init.shared.b64": "t.mbarrier_init($0:address, $1:u32)",
    "mbarrier.arrive.shared.b64": "$0:b64 = t.mbarrier_arrive($1:address, 0)",
    "mbarrier.arrive.expect_tx.shared::cta.b64": "$0:b64 = t.mbarrier_arrive($1:address, $2:u32)",
    # Both wait for the phase, so that a wait without end is a deadlock that the emulator reports.
    "mbarrier.(try|test)_wait.parity.shared.b64": "$0:pred = t.mbarrier_wait($1:address, $2:u32)",
    # Tensor cores.
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "$0:b32[4] = t.ldmatrix($1:address, false)",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": "$0:b32[4] = t.ldmatrix($1:address, true)",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": (
        "$0:f32[4] = t.mma_f16($1:b32[4], $2:b32[2], $3:f32[4])"
    ),
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": (
        "$0:f32[4] = t.mma_bf16($1:b32[4], $2:b32[2], $3:f32[4])"
    ),
}

for _name, _sign in COMPARE.items():
    RULES[f"setp.{_name}.{{T}}"] = f"$0:pred = $1:{{T}} {_sign} $2:{{T}}"
    RULES[f"setp.{_name}u.f32"] = f"$0:pred = unordered($1:f32, $2:f32) | ($1:f32 {_sign} $2:f32)"
RULES["setp.ne.f32"] = "$0:pred = !unordered($1:f32, $2:f32) & ($1:f32 != $2:f32)"
RULES["setp.num.f32"] = "$0:pred = !unordered($1:f32, $2:f32)"
RULES["setp.nan.f32"] = "$0:pred = unordered($1:f32, $2:f32)"
for _name, _space in SPACES.items():
    RULES[f"ld{_name}.{{L}}"] = f"$0:{{L}} = t.load<{{L:c}}>({_space}, $1:address)"
    RULES[f"ld{_name}.v{{N}}.{{L}}"] = (
        f"$0:{{L}}[{{N}}] = t.load<std::array<{{L:c}}, {{N}}>>({_space}, $1:address)"
    )
    RULES[f"st{_name}.{{L}}"] = f"t.store({_space}, $0:address, $1:{{L}})"
    RULES[f"st{_name}.v{{N}}.{{L}}"] = f"t.store({_space}, $0:address, $1:{{L}}[{{N}}])"
for _name, _function in ATOMICS.items():
    _change = f"[=]({{A:c}} old) {{ return {_function}; }}"
    for _space, _of in ((".shared", "kShared"), (".global", "kGlobal"), ("", "kGeneric")):
        RULES[f"atom{_space}.{_name}.{{A}}"] = (
            f"$0:{{A}} = t.atomic<{{A:c}}>({_of}, $1:address, kRelaxed, {_change})"
        )
    for _order, _ordered in (("relaxed", "kRelaxed"), ("acq_rel", "kAcquireRelease")):
        RULES[f"atom.{_name}.{_order}.gpu.{{A}}"] = RULES[f"atom.{_order}.gpu.{_name}.{{A}}"] = (
            f"$0:{{A}} = t.atomic<{{A:c}}>(kGeneric, $1:address, {_ordered}, {_change})"
        )


@cache
def find_rule(opcode: str) -> str | None:
    """The C++ statement of an opcode, with its types filled in; None if there is no rule."""
    if opcode in RULES:
        return RULES[opcode]
    for pattern, rule in _patterns():
        if match := pattern.fullmatch(opcode):
            return _fill_in(rule, match.groupdict())
    return None


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    patterns = []
    for opcode, rule in RULES.items():
        text = re.sub(r"\[([^]]*)\]", r"(?:\1)?", opcode).replace(".", r"\.")
        text = re.sub(r"\{(\w)\}", lambda name: f"(?P<{name[1]}>{GROUPS[name[1]]})", text)
        patterns.append((re.compile(text), rule))
    return patterns


def _fill_in(rule: str, types: dict[str, str]) -> str:
    types = dict(types)
    for kind in [kind for group, kind in types.items() if group not in ("N", "H")]:
        bits = int(kind[1:])
        types |= {"U": f"u{bits}", "B": f"b{bits}", "W": f"{kind[0]}{2 * bits}"}
    rule = re.sub(r"\{(\w):c\}", lambda name: c_type(types[name[1]]), rule)
    return re.sub(r"\{(\w)\}", lambda name: types[name[1]], rule)


def c_type(kind: str) -> str:
    """The C++ type of a PTX type."""
    if kind in ("pred", "f32"):
        return {"pred": "bool", "f32": "float"}[kind]
    return f"{'' if kind[0] == 's' else 'u'}int{kind[1:]}_t"
