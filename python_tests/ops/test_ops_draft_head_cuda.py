"""The CUDA kernel of ``draft_head``, emulated and on a GPU.

Float32 drafts equal the specification's. The 8-bit weights here are numbers that 16 bits hold exactly, so the
error is at most twice that of the specification in 16 bits.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.drafters.checkpoint_cases import random_head
from helpers.drafters.head_cases import KINDS, Run, elements, head_of
from helpers.models.tiny import prompts, tiny_model
from helpers.ops.emulation import DRAFT_HEAD_PARAMS
from helpers.ops.head_op_cases import (
    EMULATED_ROUNDS,
    SHAPES,
    STATIC,
    OpRun,
    assert_equal_drafts,
    assert_same_draft,
    check_against_reference,
    committed,
    errors_with_8_bit_weights,
    poisoned,
    some_emulated,
)
from helpers.ops.op_cases import DEVICES

import specdec_ext
from specdec_ext import HeadDrafter, ops
from specdec_ext.heads.config import DraftHead
from specdec_ext.ops import _library
from specdec_ext.ops.draft_head import tree_arguments
from specdec_ext.ops.packed_head import sync_bytes
from specdec_ext.tree.config import TreeConfig

pytestmark = pytest.mark.parametrize(
    "device",
    [*DRAFT_HEAD_PARAMS, *(device for device in DEVICES if device == "cuda")],
    indirect=True,
)


@pytest.mark.parametrize(
    ("rows", "tree"),
    some_emulated(
        [(1, "static"), (1, "dynamic"), (3, "static"), (20, "dynamic"), (36, "low")],
        {(3, "static"), (36, "low")},
    ),
)
def test_many_rows_equal_reference(rows, tree, device):
    """36 rows have more lists and new elements than a pass takes; every fourth row has nothing new."""
    tree = TreeConfig(2, 3, 8) if tree == "low" else SHAPES[tree]
    head = head_of("qk-norm-window")
    tokens, features = elements(head, rows, 3)
    counts = [0 if row % 4 == 3 else 1 + row % 3 for row in range(rows)]
    ours, theirs = OpRun.start(head, rows, device=device), Run.start(head, rows)
    for _ in range(1 if rows > 3 else 2):
        drafted = ours.draft(tree, tokens, poisoned(features, counts), torch.tensor(counts))
        expected = theirs.draft(tree, tokens, features, torch.tensor(counts))
        assert_same_draft(drafted, expected)
    for actual, expected in zip(committed(ours), committed(theirs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def committed_text(head: DraftHead, lengths: Sequence[int], device: str) -> tuple[OpRun, Run]:
    """Runs whose caches hold ``lengths`` random elements, and NaN behind them."""
    runs = []
    for kind in (OpRun, Run):
        run = kind.start(head, len(lengths), capacity=max(lengths) + 32)
        generator = torch.Generator().manual_seed(3)
        for cache in (run.keys, run.values):
            for row, length in enumerate(lengths):
                used = cache[:, row, :, :length]
                used.copy_(torch.randn(used.shape, generator=generator))
        run.lengths = run.positions = torch.tensor(lengths)
        runs.append(run)
    ours, theirs = runs
    ours.device = device
    ours.keys, ours.values = ours.keys.to(device), ours.values.to(device)
    return ours, theirs


@pytest.mark.parametrize(
    ("name", "lengths"),
    some_emulated(
        itertools.product(["eagle1", "qk-norm-window"], [(0, 126, 387), (8190,), (8180, 8500, 1)]),
        {("qk-norm-window", (0, 126, 387)), ("eagle1", (8190,))},
    ),
    ids=str,
)
def test_long_texts_equal_reference(name, lengths, device):
    """Attention has one split, several, and the largest number. A split ends between the last slots of two
    elements, and between the first slots that two others see."""
    head = head_of(name)
    ours, theirs = committed_text(head, lengths, device)
    counts = torch.tensor([1, 3, 2])[: len(lengths)]
    tokens, features = elements(head, len(lengths), 3)
    drafts = [run.draft(SHAPES["dynamic"], tokens, features, counts) for run in (ours, theirs)]
    assert_same_draft(*drafts)


def test_absent_nodes_that_see_nothing_committed(device):
    """With a vocabulary of two tokens the third node of a level is absent. With a window of one token it sees
    only itself, and its values reach no other node in the next layer."""
    head = head_of("qk-norm-window", draft_vocab_size=2, sliding_windows=(1, None))
    check_against_reference(head, TreeConfig(3, 3, 12), device, EMULATED_ROUNDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_repeats_have_the_same_bits(dtype, device, emulated):
    """The emulator compares three orders of threads in each call."""
    head = head_of("eagle3.1", dtype=dtype)
    tokens, features = elements(head, 3, 12)
    drafts = []
    for _ in range(2 if emulated else 250):
        run = OpRun.start(head, 3, device=device)
        drafts.append(run.draft(SHAPES["dynamic"], tokens, features))
    for drafted in drafts[1:]:
        assert_equal_drafts(drafted, drafts[0])


@pytest.mark.parametrize(
    ("name", "weights", "dtype"),
    some_emulated(
        itertools.product(KINDS, ["int8", "float8"], [torch.bfloat16, torch.float16]),
        {("qk-norm-window", "int8", torch.bfloat16), ("eagle1", "float8", torch.float16)},
    ),
    ids=str,
)
def test_error_with_8_bit_weights_is_at_most_twice_the_references(
    name, weights, dtype, device, emulated
):
    ours, theirs = errors_with_8_bit_weights(name, weights, dtype, device, 4 if emulated else 10)
    assert ours <= 2 * theirs


def any_head(seed: int) -> DraftHead:
    """A head whose config the kernel takes in float32."""
    rng = random.Random(seed)
    kind = rng.choice(["eagle1", "eagle3", "eagle3", "mtp"])
    kv_heads, group = rng.choice([1, 2, 3]), rng.randint(1, 6)
    hidden, layers = 4 * rng.randint(1, rng.choice([12, 12, 70])), rng.choice([1, 1, 2, 3])
    draft_vocab, num_features = rng.choice([1, 2, 31, rng.randint(1, 700)]), rng.choice([1, 2, 3])
    flags = ["qkv_bias", "o_bias", "qk_norm", "own_embedding", "own_lm_head", "fc_bias"]
    options: dict[str, Any] = dict(
        hidden_size=hidden,
        intermediate_size=4 * rng.randint(1, 60),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=rng.choice([8, 16, 24, 72] if group < 4 else [8, 16]),
        num_layers=layers,
        vocab_size=draft_vocab + rng.choice([0, 1, 50]),
        draft_vocab_size=draft_vocab,
        logit_scale=rng.choice([1.0, 0.5]),
        sliding_windows=tuple(rng.choice([None, 1, 2, 5, 17]) for _ in range(layers)),
    )
    partial = {"rope_theta": 500.0, "partial_rotary_factor": rng.choice([0.25, 0.5])}
    if rng.random() < 0.3:
        options["rope_parameters"] = partial
    if kind != "eagle3":
        options |= dict(num_features=1, target_hidden_size=hidden)
    else:
        flags += ["norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"]
        options |= dict(num_features=num_features, target_hidden_size=4 * rng.randint(1, 30))
        if rng.random() < 0.25:
            options |= dict(has_fc=False, num_features=1, target_hidden_size=hidden)
        if rng.random() < 0.3:
            options["mask_token_id"] = rng.randrange(options["vocab_size"])
    return random_head(kind, seed=seed, **options, **{flag: rng.random() < 0.4 for flag in flags})


def any_tree(seed: int) -> TreeConfig:
    rng = random.Random(seed)
    depth, top_k = rng.randint(1, 5), rng.choice([2, 3, 7])
    kind = rng.choice(["chain", "static", "dynamic"])
    if kind == "chain":
        return TreeConfig(depth, num_nodes=rng.choice([None, 2, 8]))
    if kind == "dynamic":
        return TreeConfig(depth, top_k, rng.choice([None, 2, 30]))
    paths: list[tuple[int, ...]] = [()]
    for _ in range(rng.randint(1, 20)):
        paths.append((*rng.choice(paths), rng.randrange(top_k)))
    return TreeConfig(choices=tuple(path for path in paths if path))


@pytest.mark.parametrize("seed", some_emulated(range(60), range(6)))
def test_random_heads_and_trees_equal_reference(seed, device):
    """Sizes and options are random; some rows have nothing new."""
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 3, 7])
    rounds = []
    for most in rng.choices([1, 2, 5, 20], k=2):
        counts = [rng.choice([0, most, rng.randint(0, most)]) for _ in range(rows)]
        rounds.append((most, counts))
    check_against_reference(any_head(seed), any_tree(seed), device, rounds)


NEW, SLOTS, CAPACITY, VOCAB = 3, 6, 40, 97  # of the runs below
BAD_NUMBERS = [
    *(("counts", number) for number in (-1, NEW + 1, 2**62)),
    *(("lengths", number) for number in (-1, CAPACITY - NEW - SLOTS + 1, 2**62)),
    *(("positions", number) for number in (-1, CAPACITY - NEW - 2 + 1, 2**62)),
    *(("roots", number) for number in (-1, VOCAB)),
    *(("tokens", number) for number in (-1, VOCAB, 2**62)),
]


def test_rows_with_a_number_out_of_range_draft_nothing(device):
    """Their scores are NaN, their caches are not written, and other rows have the same bits."""
    head, tree = head_of("qk-norm-window"), TreeConfig(3, 3, 12)
    bad = range(1, len(BAD_NUMBERS) + 1)
    legal = (0, len(BAD_NUMBERS) + 1)
    tokens, features = elements(head, len(BAD_NUMBERS) + 2, NEW)
    counts = torch.tensor([2, *[NEW] * len(BAD_NUMBERS), 1])
    runs = [OpRun.start(head, len(counts), capacity=CAPACITY, device=device) for _ in range(2)]
    expected, arguments = (run.arguments(tokens, features, counts) for run in runs)
    for row, (name, number) in zip(bad, BAD_NUMBERS, strict=True):
        arguments[name] = arguments[name].clone()
        arguments[name][(row, NEW - 1) if name == "tokens" else row] = number
    drafts = [
        [each.cpu() for each in ops.draft_head(**given, tree=tree)]
        for given in (expected, arguments)
    ]
    for row in bad:
        assert_root_alone([each[row] for each in drafts[1]], int(arguments["roots"][row]))
        assert arguments["keys"][:, row].isnan().all() and arguments["values"][:, row].isnan().all()
    for row in legal:
        assert_equal_drafts([each[row] for each in drafts[1]], [each[row] for each in drafts[0]])


def assert_root_alone(drafted: list[torch.Tensor], root: int, score: float = torch.nan) -> None:
    tokens, parents, scores = drafted
    assert tokens.tolist() == [root, *[0] * (len(tokens) - 1)]
    assert parents.tolist() == [-1, *[-2] * (len(tokens) - 1)]
    expected = torch.tensor([score, *[-torch.inf] * (len(tokens) - 1)])
    assert torch.equal(scores.isnan(), expected.isnan())
    assert torch.equal(scores[1:], expected[1:])


def test_largest_legal_numbers_equal_reference(device):
    head, tree = head_of("qk-norm-window"), TreeConfig(3, 3, 12)
    tokens, features = elements(head, 1, NEW)
    tokens[0, 0], tokens[0, -1] = VOCAB - 1, 0
    lengths = [CAPACITY - NEW - SLOTS]
    ours, theirs = committed_text(head, lengths, device)
    ours.keys, ours.values = (
        cache[:, :, :, :CAPACITY].contiguous() for cache in (ours.keys, ours.values)
    )
    for run in (ours, theirs):
        run.positions = torch.tensor([CAPACITY - NEW - 2])
        run.cosines, run.sines = run.cosines[:CAPACITY], run.sines[:CAPACITY]
    assert_same_draft(*(run.draft(tree, tokens, features) for run in (ours, theirs)))


def test_unused_elements_may_hold_any_number(device):
    """In a row without new elements only the root is read."""
    head = head_of("eagle3")
    tokens, features = elements(head, 2, 3)
    runs = [OpRun.start(head, 2, device=device) for _ in range(2)]
    expected, arguments = (run.arguments(tokens, features, torch.tensor([0, 2])) for run in runs)
    arguments["lengths"] = torch.tensor([-5, 0], device=device)
    arguments["positions"] = torch.tensor([2**40, 0], device=device)
    arguments["tokens"] = torch.tensor(
        [[-1, -1, -1], [*tokens[1, :2].tolist(), 2**40]], device=device
    )
    drafts = [
        [each.cpu() for each in ops.draft_head(**given, tree=STATIC)]
        for given in (expected, arguments)
    ]
    assert_equal_drafts(*drafts)
    assert_root_alone([each[0] for each in drafts[1]], int(arguments["roots"][0]), 0.0)


@pytest.mark.parametrize(
    ("tree", "wrong"),
    some_emulated(
        itertools.product(["chain", "static", "dynamic"], [-1, VOCAB, 2**40]), {("dynamic", VOCAB)}
    ),
)
def test_row_that_drafts_an_illegal_draft_to_target_drafts_nothing(tree, wrong, device):
    head = head_of("eagle3")
    tokens, features = elements(head, 1, 3)
    run = OpRun.start(head, 1, device=device)
    best = run.draft(SHAPES[tree], tokens, features)[0][0, 1]
    run = OpRun.start(head, 1, device=device)
    ids = head.tensors["draft_to_target"].clone()
    run.packed.weights[2] = ids.where(ids != best, wrong).to(device)
    drafted = run.draft(SHAPES[tree], tokens, features)
    assert_root_alone([each[0] for each in drafted], int(tokens[0, -1]))


@pytest.mark.parametrize(
    ("row", "wrong"),
    some_emulated(
        [
            (4, (1, -1)),  # no candidate
            (4, (2**62, 0)),
            (4, (8, 0)),  # a node of the last level
            (6, (4, 0)),  # a node beside it: the level is empty
            (3, (3, 0)),  # more parents than in widths
            (0, (1, 0)),  # itself
            (0, (0, -(2**63))),
            (9, (-(2**63), 2**62)),
        ],
        {(4, (2**62, 0)), (6, (4, 0))},
    ),
    ids=str,
)
def test_choices_that_levels_do_not_describe_cost_nodes(row, wrong, device):
    """On CUDA the host does not compare them; the rest of the tree has legal tokens and links."""
    head = head_of("eagle3")
    run = OpRun.start(head, 2, device=device)
    arguments = run.arguments(*elements(head, 2, 3), torch.tensor([3, 1]))
    packed = arguments.pop("head")
    choices, *others = tree_arguments(STATIC, torch.device(device))
    choices = choices.clone()
    choices[row] = torch.tensor(wrong)
    drafted = _library.native.draft_head(
        packed.weights, packed.layout, packed.scalars, *arguments.values(), choices, *others
    )
    for tokens, parents, scores in zip(*(each.tolist() for each in drafted), strict=True):
        assert parents[0] == -1
        for node, parent in enumerate(parents[1:], start=1):
            assert parent == -2 or (parent < node and parents[parent] != -2)
            assert (scores[node] > -torch.inf) == (parent != -2)
            assert 0 <= tokens[node] < head.config.vocab_size


def test_sync_buffer_can_be_used_by_many_launches(device):
    """With trees and batches of several sizes; its counters are zero after each launch.

    On the CPU, the emulator's ops are called directly, because ``_library.native`` gives each thread order
    its own copy of the buffer.
    """
    head = head_of("qk-norm-window")
    sync = torch.zeros(sync_bytes(head.config), dtype=torch.uint8, device=device)
    native, launches = torch.ops.specdec, contextlib.nullcontext
    if device == "cpu":
        native, launches = torch.ops.specdec_emulated, _library.native.launches
    for rows, tree in ((1, TreeConfig(2)), (3, STATIC), (2, SHAPES["dynamic"])):
        tokens, features = elements(head, rows, 4)
        run = OpRun.start(head, rows, device=device)
        expected = run.draft(tree, tokens, features)
        again = OpRun.start(head, rows, device=device)
        arguments = again.arguments(tokens, features, torch.full((rows,), 4))
        packed = arguments.pop("head")
        with launches():
            drafted = native.draft_head(
                packed.weights,
                packed.layout,
                packed.scalars,
                *arguments.values(),
                *tree_arguments(tree, torch.device(device)),
                None,
                sync,
            )
        assert_equal_drafts([each.cpu() for each in drafted], expected)
        assert int(sync.count_nonzero()) <= 1  # the turn of the barrier


@pytest.mark.parametrize(
    ("kind", "tree"),
    some_emulated(
        itertools.product(["eagle1", "mtp", "eagle3.1", "qk-norm-window", "p-eagle"], SHAPES),
        {("qk-norm-window", "static"), ("p-eagle", "dynamic"), ("mtp", "chain")},
    ),
)
def test_launch_for_each_phase_has_the_bits_of_one_launch(kind, tree, device):
    """Also in the cache, and with a row that has nothing new."""
    head = head_of(kind)
    tokens, features = elements(head, 3, 4)
    runs = []
    for phase_launches in (False, True):
        run = OpRun.start(head, 3, device=device)
        counts = torch.tensor([2, 0, 4])
        arguments = run.arguments(tokens, features, counts)
        drafted = ops.draft_head(**arguments, tree=SHAPES[tree], phase_launches=phase_launches)
        runs.append([*drafted, run.keys, run.values])
    for one, many in zip(*runs, strict=True):
        torch.testing.assert_close(one, many, rtol=0, atol=0, equal_nan=True)


def test_rejects_a_sync_buffer_that_does_not_fit(device):
    head = head_of("qk-norm-window")
    run = OpRun.start(head, 1, device=device)
    arguments = run.arguments(*elements(head, 1, 2), torch.tensor([2]))
    bytes_ = sync_bytes(head.config)
    for sync, message in (
        (torch.zeros(bytes_ - 1, dtype=torch.uint8), rf"with at least {bytes_} bytes, got shape"),
        (torch.zeros(bytes_), r"must be torch.uint8, got torch.float32"),
    ):
        packed = dataclasses.replace(arguments["head"], sync=sync.to(device))
        with pytest.raises(ValueError, match=rf"argument sync .*{message}"):
            ops.draft_head(**{**arguments, "head": packed}, tree=STATIC)


def test_a_row_has_the_same_bits_wherever_its_inputs_are_kept(device):
    """Inputs of 7 rows of 512 floats fit into shared memory beside the sums; those of 8 rows do not."""
    head = head_of("mtp", hidden_size=512, target_hidden_size=512, intermediate_size=16)
    tokens, features = elements(head, 8, 1)
    drafted = {}
    for rows in (7, 8):
        run = OpRun.start(head, rows, device=device)
        drafted[rows] = (
            *run.draft(TreeConfig(2), tokens[:rows], features[:rows]),
            run.keys,
            run.values,
        )
    for few, many in zip(drafted[7][:3], drafted[8][:3], strict=True):
        assert torch.equal(few, many[:7])
    for few, many in zip(drafted[7][3:], drafted[8][3:], strict=True):
        assert torch.equal(few.nan_to_num(), many[:, :7].nan_to_num())


class OnlyDrafts:
    """Emulates draft_head alone; the target uses the CPU ops."""

    def __init__(self, emulated: Any) -> None:
        self._emulated = emulated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._emulated if name == "draft_head" else torch.ops.specdec, name)


@pytest.mark.parametrize("weights", ["same", "int8"])
def test_drafts_of_the_kernel_leave_the_text_unchanged(weights, device, emulated, monkeypatch):
    if emulated:
        monkeypatch.setattr(_library, "native", OnlyDrafts(_library.native))
    # On the CPU, the head of a float16 target computes in float32.
    half = torch.bfloat16 if emulated else torch.float16
    dtype = torch.float32 if weights == "same" else half
    model = copy.deepcopy(tiny_model("llama", dtype=dtype)).to(device)
    ids, mask = (tensor.to(device) for tensor in prompts((5, 3)))
    # On CUDA, rows of matrices have multiples of 16 bytes.
    drafter = HeadDrafter(head_of("eagle3.1"), TreeConfig(3, 2, 5), weights)
    kwargs = dict(attention_mask=mask, max_new_tokens=6)
    given = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
    assert drafter._bound.refusal(drafter.tree, 2) is None
    if dtype == torch.float32:
        assert torch.equal(given, specdec_ext.generate(model, ids, drafter=None, **kwargs))
    assert given.shape == (2, 11)
