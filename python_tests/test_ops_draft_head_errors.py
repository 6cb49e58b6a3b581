"""``draft_head`` checks every size, dtype, stride and number before it follows a pointer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from head_cases import Run, elements, head_of
from test_ops_draft_head import OpRun

from specdec_ext import ops
from specdec_ext.tree_config import TreeConfig

# Argument, change of a valid one, message.
BAD_ARGUMENTS: list[tuple[str, Any, str]] = [
    ("features", lambda t: t.half(), r"must be torch.float32 or torch.bfloat16, got torch.float16"),
    ("features", lambda t: t[0], r"must be \[rows, new, feature_width\], got shape \[4, 96\]"),
    ("features", lambda t: t[..., 1:], r"must be .* = \[3, 4, 96\], got shape \[3, 4, 95\]"),
    (
        "features",
        lambda t: t.mT.contiguous().mT,
        r"must be contiguous in its last dim.*, got stride 4",
    ),
    ("tokens", lambda t: t.int(), r"must be torch.int64, got torch.int32"),
    ("tokens", lambda t: t[:, 1:], r"must be \[rows, new\] = \[3, 4\], got shape \[3, 3\]"),
    ("tokens", lambda t: t + 97, r"has \d+ in row 0; expected \[0, 97\)"),
    ("tokens", lambda t: -1 - t, r"has -\d+ in row 0; expected \[0, 97\)"),
    ("counts", lambda t: t[:2], r"must be \[rows\] = \[3\], got shape \[2\]"),
    ("counts", lambda t: t.float(), r"must be torch.int64, got torch.float32"),
    ("counts", lambda t: t + 1, r"has 5 in row 0; expected \[0, 5\)"),
    ("counts", lambda t: t - 5, r"has -1 in row 0; expected \[0, 5\)"),
    ("lengths", lambda t: t[:2], r"must be \[rows\] = \[3\]"),
    ("lengths", lambda t: t - 1, r"has -1 in row 0; expected \[0, 119\)"),
    (
        "lengths",
        lambda t: t + 119,
        r"has 119 in row 0; expected \[0, 119\): a capacity of 128 slots less 4 new elements and 6 of the "
        r"draft; grow keys and values",
    ),
    ("lengths", lambda t: t + 2**62, r"has 4611686018427387904 in row 0; expected"),
    ("positions", lambda t: t - 1, r"has -1 in row 0; expected \[0, 123\)"),
    (
        "positions",
        lambda t: t + 123,
        r"has 123 in row 0; expected \[0, 123\): cosines and sines have 128 positions, for 4 new elements "
        r"and 2 levels; make longer tables",
    ),
    ("roots", lambda t: t + 97, r"has \d+ in row 0; expected \[0, 97\)"),
    ("roots", lambda t: t[:, None], r"must be \[rows\] = \[3\], got shape \[3, 1\]"),
    ("cosines", lambda t: t.double(), r"must be torch.float32, got torch.float64"),
    ("cosines", lambda t: t[0], r"must be \[positions, rotary / 2\], got shape \[4\]"),
    (
        "sines",
        lambda t: t[1:],
        r"must be \[positions, rotary / 2\] = \[128, 4\], got shape \[127, 4\]",
    ),
    (
        "sines",
        lambda t: t.mT.contiguous().mT,
        r"must be contiguous in its last dimension, got stride 128",
    ),
    ("keys", lambda t: t.bfloat16(), r"must be torch.float32, got torch.bfloat16"),
    (
        "keys",
        lambda t: t[0],
        r"must be \[layers, rows, kv_heads, capacity, head_dim\], got shape \[",
    ),
    (
        "keys",
        lambda t: t[:, :2],
        r"must be .* = \[2, 3, 2, 128, 8\], got shape \[2, 2, 2, 128, 8\]",
    ),
    (
        "keys",
        lambda t: t[:, :1].expand_as(t),
        r"must not be an expanded tensor, got stride 0 in dim.* 1",
    ),
    (
        "keys",
        lambda t: t.mT.contiguous().mT,
        r"must be contiguous in its last dimension, got stride 128",
    ),
    (
        "values",
        lambda t: t[..., :5, :],
        r"must be .* = \[2, 3, 2, 128, 8\], got shape \[2, 3, 2, 5, 8\]",
    ),
]


def valid_arguments() -> dict[str, Any]:
    head = head_of("qk-norm-window")
    run = OpRun.start(head, rows=3)
    return run.arguments(*elements(head, 3, 4), torch.full((3,), 4))


@pytest.mark.parametrize(("name", "change", "message"), BAD_ARGUMENTS)
def test_rejects(name, change, message):
    arguments = valid_arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"^specdec::draft_head: argument {name} {message}"):
        ops.draft_head(**arguments, tree=TreeConfig(3, 3, 12))


@pytest.mark.parametrize(
    ("choices", "numbers", "message"),
    [
        ([], (0, 3, 12), r"depth must be 1 to 4096, got 0"),
        ([], (3, 0, 12), r"top_k must be 1 to 4096, got 0"),
        ([], (3, 3, 0), r"nodes must be 1 to 1024, got 0"),
        ([], (3, 3, 1025), r"nodes must be 1 to 1024, got 1025"),
        (
            [],
            (2, 64, 12),
            r"top_k = 64 at depth 2 makes 4160 candidates; expected at most 4096, so",
        ),
        ([], (4096, 4096, 12), r"top_k = 4096 at depth 4096 makes 68702703616 candidates"),
        ([[0, 0, 0]], (1, 1, 2), r"choices must be \[choices, 2\] = \[1, 2\], got shape \[1, 3\]"),
        ([[0, 0], [1, 0]], (2, 1, 2), r"choices must be fewer than nodes, 2, got shape \[2, 2\]"),
        (
            [[1, 0]],
            (1, 1, 2),
            r"choices has the node \(1, 0\) in row 0; expected an earlier node as parent",
        ),
        (
            [[-1, 0]],
            (1, 1, 2),
            r"choices has the node \(-1, 0\) in row 0; expected an earlier node",
        ),
        (
            [[0, 1]],
            (1, 1, 2),
            r"choices has the node \(0, 1\) in row 0; expected a rank in \[0, 1\)",
        ),
        (
            [[0, -1]],
            (1, 1, 2),
            r"choices has the node \(0, -1\) in row 0; expected a rank in \[0, 1\)",
        ),
        (
            [[0, 0], [1, 0], [0, 1]],
            (2, 2, 4),
            r"choices has the node .* in row 2; expected level order",
        ),
        ([[0, 0]], (2, 1, 2), r"depth must be the depth of choices, 1, got 2"),
    ],
)
def test_rejects_shapes_of_trees(choices, numbers, message):
    packed, *tensors = valid_arguments().values()
    links = torch.tensor(choices, dtype=torch.long).view(len(choices), -1 if choices else 2)
    with pytest.raises(ValueError, match=rf"^specdec::draft_head: argument {message}"):
        torch.ops.specdec.draft_head(
            packed.weights, packed.layout, packed.scalars, *tensors, links, *numbers
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.layout.clear(), r"layout ends before is_eagle1; make it with PackedHead.pack"),
        (lambda p: p.layout.__delitem__(slice(12, None)), r"layout must end with a sliding window"),
        (
            lambda p: p.layout.append(0),
            r"weights must have 46 tensors for the layers of layout, got 34",
        ),
        (
            lambda p: p.layout.__setitem__(3, 0),
            r"layout gives hidden_size = 0; expected 1 to 268435456",
        ),
        (
            lambda p: p.layout.__setitem__(3, 2**62),
            r"layout gives hidden_size = 4611686018427387904",
        ),
        (lambda p: p.layout.__setitem__(6, 3), r"layout gives 4 heads; expected a multiple of 3"),
        (
            lambda p: p.layout.__setitem__(8, 5),
            r"layout gives feature_width 96; expected a multiple of num",
        ),
        (
            lambda p: p.layout.__setitem__(10, 5),
            r"layout gives mask_token_id = 5; expected a token",
        ),
        (
            lambda p: p.layout.__setitem__(0, 1),
            r"weights\[5\] \(fc\) must be .* = \[1, 120, 32, 1\], got shape \[1, 96,",
        ),
        (
            lambda p: p.scalars.pop(),
            r"scalars must be \[rms_norm_eps, logit_scale\], got 1 numbers",
        ),
        (
            lambda p: p.weights.pop(),
            r"weights must have 34 tensors for the layers of layout, got 33",
        ),
        (
            lambda p: p.weights.__setitem__(0, p.weights[0][0]),
            r"weights\[0\] \(embed_tokens\) must be \[to",
        ),
        (
            lambda p: p.weights.__setitem__(1, p.weights[1][:0]),
            r"weights\[1\] \(lm_head\) must be \[panels, .* = \[2, 24, 32, 1\], got",
        ),
        (
            lambda p: p.weights.__setitem__(2, p.weights[2][:0]),
            r"weights\[2\] \(draft_to_target\) must be there where lm_head has 61 tokens and the embed",
        ),
        (
            lambda p: p.weights.__setitem__(2, p.weights[2].int()),
            r"weights\[2\] .* must be torch.int64, got",
        ),
        (
            lambda p: p.weights[2].fill_(97),
            r"weights holds draft_to_target\[\d+\] = 97; expected a token in \[0, 97\)",
        ),
        (
            lambda p: p.weights[2].fill_(-1),
            r"weights holds draft_to_target\[\d+\] = -1; expected a token",
        ),
        (
            lambda p: p.weights.__setitem__(5, p.weights[5][:0]),
            r"layout gives feature_width 96; expected hid",
        ),
        (
            lambda p: p.weights.__setitem__(7, p.weights[7][:0]),
            r"weights\[7\] \(hidden_norm\) must be \[count",
        ),
        (
            lambda p: p.weights.__setitem__(
                11, p.weights[11].transpose(1, 2).contiguous().transpose(1, 2)
            ),
            r"weights\[11\] \(q_proj\) must be contiguous, got stride 48 in dimension 2; PackedHead.pack",
        ),
        (
            lambda p: p.weights.__setitem__(12, p.weights[12][1:]),
            r"weights\[12\] \(q_proj bias\) must be",
        ),
        (
            lambda p: p.weights.__setitem__(21, p.weights[21].bfloat16()),
            r"weights\[21\] \(down_proj\) must be torch.float32, got torch.bfloat16",
        ),
    ],
)
def test_rejects_packed_heads(change, message):
    arguments = valid_arguments()
    change(arguments["head"])
    with pytest.raises(ValueError, match=rf"^specdec::draft_head: argument {message}"):
        ops.draft_head(**arguments, tree=TreeConfig(3, 3, 12))


def test_rejects_what_eagle1_has_not():
    head = head_of("eagle1")
    run = OpRun.start(head, rows=1)
    arguments = run.arguments(*elements(head, 1, 4), torch.tensor([4]))
    for index, name in ((7, "hidden_norm"), (8, "norm"), (10, "input_layernorm")):
        weights = list(arguments["head"].weights)
        weights[index] = torch.ones(32)
        packed = dataclasses.replace(arguments["head"], weights=weights)
        with pytest.raises(
            ValueError, match=rf"weights\[{index}\] \({name}\) must be empty .* EAGLE-1"
        ):
            ops.draft_head(**{**arguments, "head": packed}, tree=TreeConfig(3))


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        (
            torch.float16,
            {},
            r"a head made in memory has weights in torch.float16; the CPU op takes",
        ),
        (
            torch.float32,
            {"embedding": (97, 25)},
            r"embedding is torch.float32 \(97, 25\) on cpu; expected",
        ),
        (
            torch.float32,
            {"lm_head": (60, 24)},
            r"lm_head is .* \(60, 24\) on cpu; .* \(61, 24\) on the CPU",
        ),
        (
            torch.bfloat16,
            {"lm_head": (61, 24)},
            r"lm_head is torch.float32 .*; expected torch.bfloat16",
        ),
    ],
)
def test_pack_rejects(dtype, change, message):
    head = head_of("eagle3", dtype=dtype)
    run = Run.start(head, rows=1)
    tensors = {"embedding": run.embedding, "lm_head": run.lm_head}
    tensors |= {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        ops.PackedHead.pack(head, **tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing(dtype):
    """The embedding is shared. Matrices are in panels: an output's elements are 32 units apart."""
    head = head_of("eagle3", dtype=dtype)
    run = Run.start(head, rows=1)
    packed = ops.PackedHead.pack(head, run.embedding, run.lm_head)
    assert packed.weights[0].data_ptr() == run.embedding.data_ptr()
    panels, unit = packed.weights[1], 4 // dtype.itemsize
    assert panels.shape == (2, 24 // unit, 32, unit)
    for out, weight in enumerate(run.lm_head):
        assert torch.equal(panels[out // 32, :, out % 32].flatten(), weight)
    assert not panels[1, :, 61 - 32 :].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_refused():
    arguments = valid_arguments()
    arguments["features"] = arguments["features"].cuda()
    with pytest.raises(ValueError, match=r"features must be on the CPU; .* reference.draft_head"):
        ops.draft_head(**arguments, tree=TreeConfig(3))
