"""``draft_head`` checks sizes, dtypes and strides before it reads memory, and on the CPU all numbers.

``test_ops_draft_head_cuda.py`` tests numbers out of range on CUDA.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.drafters.head_cases import Run, elements, head_of
from helpers.ops import emulation
from helpers.ops.head_op_cases import OpRun
from helpers.ops.op_cases import DEVICES

from specdec_ext import ops
from specdec_ext.ops import _library
from specdec_ext.tree.config import TreeConfig

# Argument, change of a valid one, message.
BAD_ARGUMENTS: list[tuple[str, Any, str]] = [
    ("features", lambda t: t.double(), r"must be torch.float32.*, got torch.float64; convert the head"),
    ("features", lambda t: t[0], r"must be \[rows, new, feature_width\], got shape \[4, 96\]"),
    ("features", lambda t: t[..., 1:], r"must be .* = \[3, 4, 96\], got shape \[3, 4, 95\]"),
    ("features", lambda t: t.mT.contiguous().mT, r"must be contiguous in its last dim.*, got stride 4"),
    ("tokens", lambda t: t.int(), r"must be torch.int64, got torch.int32"),
    ("tokens", lambda t: t[:, 1:], r"must be \[rows, new\] = \[3, 4\], got shape \[3, 3\]"),
    ("counts", lambda t: t[:2], r"must be \[rows\] = \[3\], got shape \[2\]"),
    ("counts", lambda t: t.float(), r"must be torch.int64, got torch.float32"),
    ("lengths", lambda t: t[:2], r"must be \[rows\] = \[3\]"),
    ("roots", lambda t: t[:, None], r"must be \[rows\] = \[3\], got shape \[3, 1\]"),
    ("cosines", lambda t: t.double(), r"must be torch.float32, got torch.float64"),
    ("cosines", lambda t: t[0], r"must be \[positions, rotary / 2\], got shape \[4\]"),
    ("sines", lambda t: t[1:], r"must be \[positions, rotary / 2\] = \[128, 4\], got shape \[127, 4\]"),
    ("sines", lambda t: t.mT.contiguous().mT, r"must be contiguous in its last dimension, got stride 128"),
    ("keys", lambda t: t.bfloat16(), r"must be torch.float32, got torch.bfloat16"),
    ("keys", lambda t: t[0], r"must be \[layers, rows, kv_heads, capacity, head_dim\], got shape \["),
    ("keys", lambda t: t[:, :2], r"must be .* = \[2, 3, 2, 128, 8\], got shape \[2, 2, 2, 128, 8\]"),
    ("keys", lambda t: t[:, :1].expand_as(t), r"must not be an expanded tensor, got stride 0 in dim.* 1"),
    ("keys", lambda t: t.mT.contiguous().mT, r"must be contiguous in its last dimension, got stride 128"),
    ("values", lambda t: t[..., :5, :], r"must be .* = \[2, 3, 2, 128, 8\], got shape \[2, 3, 2, 5, 8\]"),
]  # fmt: skip
# Only the CPU op checks these.
BAD_NUMBERS: list[tuple[str, Any, str]] = [
    ("tokens", lambda t: t + 97, r"has \d+ in row 0; expected \[0, 97\)"),
    ("tokens", lambda t: -1 - t, r"has -\d+ in row 0; expected \[0, 97\)"),
    ("counts", lambda t: t + 1, r"has 5 in row 0; expected \[0, 5\)"),
    ("counts", lambda t: t - 5, r"has -1 in row 0; expected \[0, 5\)"),
    ("lengths", lambda t: t - 1, r"has -1 in row 0; expected \[0, 119\)"),
    ("lengths", lambda t: t + 119,
        r"has 119 .*: a capacity of 128 slots less 4 new elements and 6 of the draft; grow keys and values"),
    ("lengths", lambda t: t + 2**62, r"has 4611686018427387904 in row 0; expected"),
    ("positions", lambda t: t - 1, r"has -1 in row 0; expected \[0, 123\)"),
    ("positions", lambda t: t + 123,
        r"has 123 .*: cosines and sines have 128 positions, for 4 new elements .*; make longer tables"),
    ("roots", lambda t: t + 97, r"has \d+ in row 0; expected \[0, 97\)"),
]  # fmt: skip
# Limits of CUDA: options of the head, dtype, changes of its arguments, message.
LIMITS: dict[str, tuple[dict[str, Any], torch.dtype, dict[str, Any], str]] = {
    "hidden_size": (dict(hidden_size=36), torch.bfloat16, {},
        r"hidden_size must be a multiple of 8, not 36; specdec_ext.reference.draft_head drafts without such"),
    "intermediate_size": (dict(intermediate_size=50), torch.float32, {},
        r"intermediate_size must be a multiple of 4, not 50"),
    "feature_width": (dict(target_hidden_size=18), torch.float32, {},
        r"feature_width must be a multiple of 4, not 54"),
    "features": (dict(target_hidden_size=22, num_features=2, feature_layers=(0, 1)), torch.float32, {},
        r"target_hidden_size must be a multiple of 4, not 22"),
    "head_dim": (dict(head_dim=12), torch.float32, {},
        r"head_dim must be a multiple of 8, not 12"),
    "long head_dim": (dict(head_dim=264), torch.float32, {},
        r"head_dim must be at most 256, not 264"),
    "layers": (dict(num_layers=9), torch.float32, {},
        r"num_layers must be at most 8, not 9"),
    "depth": ({}, torch.float32, dict(tree=TreeConfig(65)),
        r"the depth of trees must be at most 64, not 65"),
    "top_k": ({}, torch.float32, dict(tree=TreeConfig(2, 33)),
        r"the top_k of trees must be at most 32, not 33"),
    "rows": ({}, torch.float32, dict(rows=129),
        r"the batch must be at most 128, not 129"),
    "8 bits": ({}, torch.float32, dict(weights="int8"),
        r"8-bit weights need torch.bfloat16 or torch.float16, not torch.float32"),
    "8-bit rows": (dict(hidden_size=40), torch.bfloat16, dict(weights="float8"),
        r"hidden_size must be a multiple of 16, not 40"),
}  # fmt: skip


KERNELS = pytest.mark.parametrize(
    "device",
    [
        *emulation.DRAFT_HEAD_PARAMS,
        *(device for device in DEVICES if device == "cuda"),
    ],
    indirect=True,
)


def valid_arguments(device: str = "cpu") -> dict[str, Any]:
    head = head_of("qk-norm-window")
    run = OpRun.start(head, rows=3, device=device)
    return run.arguments(*elements(head, 3, 4), torch.full((3,), 4))


@pytest.mark.parametrize(("name", "change", "message"), BAD_ARGUMENTS)
def test_rejects(name, change, message, device):
    arguments = valid_arguments(device)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"^specdec::draft_head: argument {name} {message}"):
        ops.draft_head(**arguments, tree=TreeConfig(3, 3, 12))


@pytest.mark.parametrize(("name", "change", "message"), BAD_NUMBERS)
def test_rejects_numbers(name, change, message):
    test_rejects(name, change, message, "cpu")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("features", lambda t: torch.nn.functional.pad(t, (0, 1))[..., :-1]),
        ("keys", lambda t: torch.nn.functional.pad(t, (0, 2))[..., :-2]),
        ("values", lambda t: torch.nn.functional.pad(t, (2, 0))[..., 2:]),
    ],
)
@KERNELS
def test_rejects_rows_that_are_not_aligned(name, change, device):
    test_rejects(name, change, r"must begin every row at a multiple of 16 bytes on CUDA", device)


@pytest.mark.parametrize(("options", "dtype", "changes", "message"), LIMITS.values(), ids=LIMITS)
@KERNELS
def test_limits_of_cuda(options, dtype, changes, message, device):
    """The op raises the sentence that ``draft_head_refusal`` returns before the call."""
    head = head_of("eagle3", dtype=dtype, **options)
    rows, weights = changes.get("rows", 1), changes.get("weights", "same")
    tree = changes.get("tree", TreeConfig(2))
    run = OpRun.start(head, rows, device=device, weights=weights)
    arguments = run.arguments(*elements(head, rows, 2), torch.full((rows,), 2))
    with pytest.raises(ValueError, match=rf"^specdec::draft_head: on CUDA {message}") as raised:
        ops.draft_head(**arguments, tree=tree)
    given = head.config, torch.device("cuda"), dtype, tree, rows, weights
    assert str(raised.value).startswith(f"specdec::draft_head: {ops.draft_head_refusal(*given)}; ")


@pytest.mark.parametrize(
    ("choices", "numbers", "message"),
    [
        ([], (0, 3, 12), r"depth must be 1 to 4096, got 0"),
        ([], (3, 0, 12), r"top_k must be 1 to 4096, got 0"),
        ([], (3, 3, 0), r"nodes must be 1 to 1024, got 0"),
        ([], (3, 3, 1025), r"nodes must be 1 to 1024, got 1025"),
        ([], (2, 64, 12), r"top_k = 64 at depth 2 makes 4160 candidates; expected at most 4096, so"),
        ([], (4096, 4096, 12), r"top_k = 4096 at depth 4096 makes 68702703616 candidates"),
        ([[0, 0, 0]], (1, 1, 2), r"choices must be \[choices, 2\] = \[1, 2\], got shape \[1, 3\]"),
        ([[0, 0], [1, 0]], (2, 1, 2), r"choices must be fewer than nodes, 2, got shape \[2, 2\]"),
        ([[1, 0]], (1, 1, 2), r"choices has the node \(1, 0\) in row 0; expected an earlier node as parent"),
        ([[-1, 0]], (1, 1, 2), r"choices has the node \(-1, 0\) in row 0; expected an earlier node"),
        ([[0, 1]], (1, 1, 2), r"choices has the node \(0, 1\) in row 0; expected a rank in \[0, 1\)"),
        ([[0, -1]], (1, 1, 2), r"choices has the node \(0, -1\) in row 0; expected a rank in \[0, 1\)"),
        ([[0, 0], [1, 0], [0, 1]], (2, 2, 4), r"choices has the node .* in row 2; expected level order"),
        ([[0, 0]], (2, 1, 2), r"depth must be the depth of choices, 1, got 2"),
    ],
)  # fmt: skip
def test_rejects_shapes_of_trees(choices, numbers, message, device, kernel):
    if kernel and message.startswith(("choices has", "depth must be the")):
        pytest.skip("read by the kernel")
    call_with_tree(device, choices, *numbers, *levels_of(choices), message=message)


def levels_of(choices: list[list[int]]) -> tuple[list[int], list[int]]:
    """The levels of legal choices with a depth of at most two."""
    first = sum(node[0] == 0 for node in choices)
    parents = len({node[0] for node in choices} - {0})
    return ([first, len(choices)], [1, parents]) if parents else ([first], [1])


def call_with_tree(device: str, choices: list[list[int]], *numbers: Any, message: str) -> None:
    packed, *tensors = valid_arguments(device).values()
    links = torch.tensor(choices, dtype=torch.long).view(len(choices), -1 if choices else 2)
    with pytest.raises(ValueError, match=rf"^specdec::draft_head: argument {message}"):
        _library.native.draft_head(
            packed.weights, packed.layout, packed.scalars, *tensors, links.to(device), *numbers
        )


LINKS = [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0]]


@pytest.mark.parametrize(
    ("levels", "on_cpu", "on_cuda"),
    [
        (([2, 4, 5], [1, 1, 1]), r"widths must be \[1, 2, 1\] for these choices, got \[1, 1, 1\]", ""),
        (([1, 4, 5], [1, 1, 1]), r"level_ends must be \[2, 4, 5\] for these choices, got \[1,", ""),
        (([2, 4], [1, 2, 1]), r"level_ends must be \[2, 4, 5\]", r"level_ends must be for each of"),
        (([2, 4, 5], [1, 2]), r"widths must be \[1, 2, 1\]", r"widths must be for each of depth = 3"),
        (([2, 2, 5], [1, 2, 1]), r"level_ends must be", r"level_ends must be ascending from 1, got"),
        (([2, 4, 6], [1, 2, 1]), r"level_ends must be", r"level_ends must be ascending up to all 5"),
        (([2, 4, 5], [2, 2, 1]), r"widths must be", r"widths must be .* at most the nodes above it"),
        (([2, 4, 5], [1, 2, 2]), r"widths must be", r"widths must be .* above it and on it, got"),
        (([2, 4, 5], [1, 0, 1]), r"widths must be", r"widths must be .* got \[1, 0, 1\]; ops.draft_"),
    ],
)  # fmt: skip
def test_rejects_levels(levels, on_cpu, on_cuda, device, kernel):
    """On CUDA they are not compared with the choices; the kernel still stays inside its memory."""
    message = on_cuda if kernel else on_cpu
    if message:
        call_with_tree(device, LINKS, 3, 2, 6, *levels, message=message)


@pytest.mark.parametrize(("ends", "widths"), [([1], []), ([], [1])])
def test_rejects_levels_of_dynamic_trees(ends, widths, device):
    name = "level_ends" if ends else "widths"
    message = rf"{name} must be empty for a dynamic tree, whose choices are, got \[1\]"
    call_with_tree(device, [], 2, 2, 5, ends, widths, message=message)


def layout(index: int, value: int):
    return lambda packed: packed.layout.__setitem__(index, value)


def weight(index: int, change: Any):
    return lambda packed: packed.weights.__setitem__(index, change(packed.weights[index]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.layout.clear(), r"layout ends before feeds_fc; make it with PackedHead.pack"),
        (lambda p: p.layout.__delitem__(slice(12, None)), r"layout must end with a sliding window"),
        (lambda p: p.layout.append(0), r"weights must have 41 tensors for the layers of layout, got 31"),
        (layout(3, 0), r"layout gives hidden_size = 0; expected 1 to 268435456"),
        (layout(3, 2**62), r"layout gives hidden_size = 4611686018427387904"),
        (layout(6, 3), r"layout gives 4 heads; expected a multiple of 3"),
        (layout(8, 5), r"layout gives feature_width 96; expected a multiple of num"),
        (layout(10, 5), r"layout gives mask_token_id = 5; expected a token"),
        (layout(0, 1), r"weights\[5\] \(fc\) must be .* = \[(1, 120, 32, 1|3, 8, 8, 16)\], got shape"),
        (lambda p: p.scalars.pop(), r"scalars must be \[rms_norm_eps, logit_scale\], got 1 numbers"),
        (lambda p: p.weights.pop(), r"weights must have 31 tensors for the layers of layout, got 30"),
        (weight(0, lambda t: t[0]), r"weights\[0\] \(embed_tokens\) must be \[to"),
        (weight(1, lambda t: t[:0]),
            r"weights\[1\] \(lm_head\) must be .* = \[(2, 24, 32, 1|8, 2, 8, 16)\], got"),
        (weight(16, lambda t: t[0]), r"weights\[16\] \(o_proj\) must be .* = \[(1, 32, 32, 1|24, 32)\], got"),
        (weight(19, lambda t: t[1:]),
            r"weights\[19\] \(gate_up_proj\) must be .* = \[(3, 24, 32, 1|12, 2, 8, 16)\], got"),
        (weight(20, lambda t: t[:, 1:].contiguous()),
            r"weights\[20\] \(down_proj\) must be .* = \[(1, 48, 32, 1|3, 3, 8, 16)\], got"),
        (weight(2, lambda t: t[:0]),
            r"weights\[2\] \(draft_to_target\) must be there where lm_head has 61 tokens and the embed"),
        (weight(2, lambda t: t.int()), r"weights\[2\] .* must be torch.int64, got"),
        (lambda p: p.weights[2].fill_(97),
            r"weights holds draft_to_target\[\d+\] = 97; expected a token in \[0, 97\)"),
        (lambda p: p.weights[2].fill_(-1), r"weights holds draft_to_target\[\d+\] = -1; expected a token"),
        (weight(5, lambda t: t[:0]), r"layout gives feature_width 96; expected hid"),
        (weight(8, lambda t: t[:0]), r"weights\[8\] \(hidden_norm\) must be \[count"),
        (weight(12, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
            r"weights\[12\] \(qkv_proj\) must be contiguous, got stride \d+ in dimension 1; PackedHead.pack"),
        (weight(13, lambda t: t[1:]), r"weights\[13\] \(qkv_proj bias\) must be"),
        (weight(20, lambda t: t.bfloat16()),
            r"weights\[20\] \(down_proj\) must be torch.float32, got torch.bfloat16"),
    ],
)  # fmt: skip
def test_rejects_packed_heads(change, message, device, kernel):
    if kernel and "weights holds" in message:
        pytest.skip("read by the kernel")
    arguments = valid_arguments(device)
    change(arguments["head"])
    with pytest.raises(ValueError, match=rf"^specdec::draft_head: argument {message}"):
        ops.draft_head(**arguments, tree=TreeConfig(3, 3, 12))


def test_rejects_a_norm_of_the_embedding_that_fc_does_not_read(device):
    head = head_of("eagle3")
    run = OpRun.start(head, rows=1, device=device)
    arguments = run.arguments(*elements(head, 1, 4), torch.tensor([4]))
    weights = list(arguments["head"].weights)
    weights[7] = torch.ones(24, device=device)
    packed = dataclasses.replace(arguments["head"], weights=weights)
    message = r"weights\[7\] \(embedding_norm\) must be empty without feeds_fc"
    with pytest.raises(ValueError, match=message):
        ops.draft_head(**{**arguments, "head": packed}, tree=TreeConfig(3))


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        (torch.float64, {}, r"a head made in memory has weights in torch.float64; the op supports"),
        (torch.float32, {"embedding": (97, 25)}, r"embedding is torch.float32 \(97, 25\) on cpu; expected"),
        (torch.float32, {"lm_head": (60, 24)}, r"lm_head is .* \(60, 24\) on cpu; .* \(61, 24\) on cpu"),
        (torch.bfloat16, {"lm_head": (61, 24)}, r"lm_head is torch.float32 .*; expected torch.bfloat16"),
    ],
)  # fmt: skip
def test_pack_rejects(dtype, change, message):
    head = head_of("eagle3", dtype=dtype)
    run = Run.start(head, rows=1)
    tensors = {"embedding": run.embedding, "lm_head": run.lm_head}
    tensors |= {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        ops.PackedHead.pack(head, **tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pack_shares_the_embedding_and_makes_panels(dtype):
    """In a panel the elements of an output are 32 units apart."""
    head = head_of("eagle3", dtype=dtype)
    run = Run.start(head, rows=1)
    packed = ops.PackedHead.pack(head, run.embedding, run.lm_head)
    assert packed.weights[0].data_ptr() == run.embedding.data_ptr()
    panels, unit = packed.weights[1], 4 // dtype.itemsize
    assert panels.shape == (2, 24 // unit, 32, unit)
    for out, weight in enumerate(run.lm_head):
        assert torch.equal(panels[out // 32, :, out % 32].flatten(), weight)
    assert not panels[1, :, 61 - 32 :].any()


def test_pack_rejects_unknown_formats():
    head = head_of("eagle3")
    run = Run.start(head, rows=1)
    with pytest.raises(ValueError, match=r"weights='int4'; expected one of same, int8, float8"):
        ops.PackedHead.pack(head, run.embedding, run.lm_head, "int4")


def test_rejects_float8_weights_on_the_cpu():
    head = head_of("eagle3", dtype=torch.bfloat16)
    run = OpRun.start(head, rows=1, weights="float8")
    message = r"weights\[1\] \(lm_head\) must have the dtype of features or torch.int8 on the CPU"
    with pytest.raises(ValueError, match=message):
        run.draft(TreeConfig(2), *elements(head, 1, 2))


def test_rejects_float16_on_the_cpu():
    head = head_of("eagle3", dtype=torch.float16)
    with pytest.raises(
        ValueError, match=r"must be torch.float32 or torch.bfloat16 on the CPU, got"
    ):
        OpRun.start(head, rows=1).draft(TreeConfig(2), *elements(head, 1, 2))


@KERNELS
@pytest.mark.parametrize("weights", ["int8", "float8"])
def test_rejects_scales(weights, device):
    """Each matrix has a float32 scale for each output."""
    head = head_of("eagle3", dtype=torch.bfloat16, hidden_size=32)
    run = OpRun.start(head, rows=1, device=device, weights=weights)
    arguments = run.arguments(*elements(head, 1, 2), torch.tensor([2]))
    good = list(run.packed.weights)
    for bad, message in (
        (good[:-1], r"weights must have 27 tensors for the layers of layout, got 26"),
        (
            [*good[:-1], good[-1].bfloat16()],
            r"weights\[26\] \(down_proj scale\) must be torch.float32",
        ),
        ([*good[:-1], good[-1][1:]], r"weights\[26\] \(down_proj scale\) must be .* = \[32\]"),
        ([good[0], good[1].bfloat16(), *good[2:]], r"weights must have 21 tensors .*, got 27"),
        ([*good[:5], good[5].bfloat16(), *good[6:]], r"weights\[5\] \(fc\) must be torch\.\w*8"),
    ):
        packed = dataclasses.replace(run.packed, weights=bad)
        with pytest.raises(ValueError, match=rf"^specdec::draft_head: argument {message}"):
            ops.draft_head(**{**arguments, "head": packed}, tree=TreeConfig(2))  # fmt: skip
