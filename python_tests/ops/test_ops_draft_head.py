"""``draft_head``: one call drafts what the specification drafts, and rows are independent.

In float32 tokens and parents are equal and scores close. In 16 bits the error of the scores against the
specification in float64 is at most twice that of the specification in the same dtype.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.drafters.golden_cases import CHAINS, TREES
from helpers.drafters.head_cases import (
    KINDS,
    Run,
    check_golden_chain,
    check_golden_trees,
    elements,
    golden_run,
    head_of,
)
from helpers.ops import emulation
from helpers.ops.head_op_cases import (
    EMULATED_ROUNDS,
    ROUNDS,
    SHAPES,
    STATIC,
    OpRun,
    assert_equal_drafts,
    assert_same_draft,
    check_against_reference,
    check_rows_are_independent,
    committed,
    drafts_of,
    noise_of,
    path_scores,
    some_emulated,
)
from helpers.ops.op_cases import DEVICES, generator, two_threads
from torch import Tensor

from specdec_ext import ops
from specdec_ext.heads.config import DraftHead
from specdec_ext.reference.verify_match import verify_match
from specdec_ext.tree.config import TreeConfig

DTYPES = [torch.float32, torch.bfloat16]
# Several blocks of lm_head, the last one not full.
VOCABULARY = dict(vocab_size=2000, draft_vocab_size=1201)
LEAST: dict[str, Any] = dict(num_heads=1, num_kv_heads=1, vocab_size=1, draft_vocab_size=1)
LEAST |= dict(num_features=1, feature_layers=(1,))
ODD_SIZES: dict[str, dict[str, Any]] = {
    "odd": dict(hidden_size=48, num_heads=3, num_kv_heads=1, head_dim=20, intermediate_size=77,
        vocab_size=101, draft_vocab_size=101, target_hidden_size=17),
    "ones": dict(hidden_size=1, head_dim=2, intermediate_size=1, target_hidden_size=1, **LEAST),
    "vocabulary": VOCABULARY,
}  # fmt: skip
# The CUDA kernel takes rows of 16 bytes. A head_dim of 72 is more than a panel of its attention.
KERNEL_ODD_SIZES: dict[str, dict[str, Any]] = {
    "odd": {**ODD_SIZES["odd"], "hidden_size": 44, "head_dim": 72, "intermediate_size": 76,
        "target_hidden_size": 20},
    "least": dict(hidden_size=4, head_dim=8, intermediate_size=4, target_hidden_size=4, **LEAST),
    "vocabulary": VOCABULARY,
    # Inputs with and without norm have several slices; 9 heads share keys and values.
    "wide": dict(hidden_size=264, intermediate_size=136, num_heads=9, num_kv_heads=1, head_dim=8),
}  # fmt: skip


@pytest.fixture(params=[*emulation.DRAFT_HEAD_PARAMS, *DEVICES])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Unlike that of other ops, the kernel's PTX depends on the family of GPUs."""
    return emulation.use(request.param, monkeypatch)


@pytest.fixture
def rounds(emulated: bool) -> list[tuple[int, list[int]]]:
    return EMULATED_ROUNDS if emulated else ROUNDS


@pytest.mark.parametrize(
    ("name", "tree"),
    some_emulated(
        itertools.product(KINDS, SHAPES),
        {
            ("eagle1", "dynamic"),
            ("eagle1-two-layers", "static"),
            ("mtp", "dynamic"),
            ("eagle3", "wide"),
            ("eagle3.1", "chain"),
            ("qk-norm-window", "dynamic"),
            ("no-fc", "cut-chain"),
            ("p-eagle", "static"),
            ("p-eagle", "padded-chain"),
        },
    ),
)
def test_equals_reference(name, tree, device, rounds):
    check_against_reference(head_of(name), SHAPES[tree], device, rounds)


@pytest.mark.parametrize(
    ("name", "tree"),
    some_emulated(
        itertools.product(["eagle1", "mtp", "eagle3", "qk-norm-window", "p-eagle"], SHAPES),
        {
            ("eagle1", "chain"),
            ("mtp", "static"),
            ("eagle3", "dynamic"),
            ("qk-norm-window", "static"),
            ("p-eagle", "dynamic"),
            ("p-eagle", "chain"),
        },
    ),
)
def test_noise_equals_reference(name, tree, device, rounds):
    """Rows with and without noise in one batch; a draft vocabulary has the noise of the target's tokens."""
    noise = noise_of(0.7, 0.0, 1.5)
    check_against_reference(head_of(name), SHAPES[tree], device, rounds, noise)


def test_noise_of_a_large_vocabulary(device, rounds):
    """Several blocks of the vocabulary; the rows have several elements per pass of the kernel."""
    head = head_of("eagle3.1", vocab_size=2000, draft_vocab_size=1201)
    check_against_reference(head, SHAPES["dynamic"], device, rounds, noise_of(1.0, 0.8, 0.0))


@pytest.mark.parametrize("temperature", [0.0, -1.0, torch.nan])
def test_no_noise_without_a_temperature(temperature, device):
    head = head_of("eagle3")
    runs = [OpRun.start(head, 2, device=device) for _ in range(2)]
    runs[0].noise = noise_of(temperature, temperature)
    assert_equal_drafts(*(run.draft(SHAPES["dynamic"], *elements(head, 2, 3)) for run in runs))


def test_drafts_are_what_the_match_rule_draws(device):
    """If the target's distribution is the head's, divided by the temperature."""
    vocab, rows = 30, 24
    head = head_of("eagle3.1", vocab_size=vocab, draft_vocab_size=vocab)
    noise = noise_of(*(0.4 + 0.1 * row for row in range(rows)))
    run, silent = (OpRun.start(head, rows, device=device) for _ in range(2))
    run.noise = noise
    tokens, features = elements(head, rows, 3)
    drafted, _, _ = run.draft(TreeConfig(1), tokens, features)
    everything, _, log_probs = silent.draft(TreeConfig(1, vocab, 1 + vocab), tokens, features)
    logits = torch.zeros(rows, vocab).scatter(1, everything[:, 1:], log_probs[:, 1:])
    logits /= noise.temperatures[:, None]
    roots = tokens[:, -1:], torch.full((rows, 1), -1), torch.full((rows,), 3)
    *_, drawn, _ = verify_match(logits[:, None], *roots, *noise[1:], torch.ones(rows).bool())
    assert torch.equal(drafted[:, 1], drawn)


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@pytest.mark.parametrize("sizes", ODD_SIZES)
@pytest.mark.parametrize("name", ["eagle3.1", "qk-norm-window"])
def test_odd_sizes(name, sizes, tree):
    check_against_reference(head_of(name, **ODD_SIZES[sizes]), SHAPES[tree], "cpu", ROUNDS)


@pytest.mark.parametrize(
    ("name", "sizes", "tree"),
    some_emulated(
        itertools.product(["eagle3.1", "qk-norm-window"], KERNEL_ODD_SIZES, ["chain", "dynamic"]),
        {
            ("eagle3.1", "odd", "dynamic"),
            ("qk-norm-window", "least", "chain"),
            ("eagle3.1", "wide", "chain"),
        },
    ),
)
def test_odd_sizes_on_cuda(name, sizes, tree, device, rounds):
    head = head_of(name, **KERNEL_ODD_SIZES[sizes])
    check_against_reference(head, SHAPES[tree], device, rounds)


def test_norms_of_all_and_of_each_feature(device, rounds):
    head = head_of("eagle3.1", norm_before_fc=True)
    check_against_reference(head, SHAPES["chain"], device, rounds)


def test_more_children_than_tokens(device, rounds):
    head = head_of("eagle3", draft_vocab_size=7)
    check_against_reference(head, SHAPES["wide"], device, rounds)


def test_more_than_64_nodes_with_children(device):
    """96 nodes have children, so bits of ancestors take two words."""
    pairs = list(itertools.product(range(32), range(2)))
    paths = [*((i,) for i in range(32)), *pairs, *((i, j, 0) for i, j in pairs)]
    head = head_of("qk-norm-window")
    check_against_reference(head, TreeConfig(choices=paths), device, [(2, [2])])


def test_more_children_on_the_cpu_than_on_cuda():
    check_against_reference(head_of("eagle3"), TreeConfig(2, 63, 40), "cpu", ROUNDS)


@pytest.mark.parametrize("layers", some_emulated([1, 2], [2]))
def test_narrow_windows(layers, device, rounds):
    """With a window of one an element sees only itself."""
    head = head_of("eagle3", num_layers=layers, sliding_windows=(1, 3)[:layers])
    check_against_reference(head, STATIC, device, rounds)


@pytest.mark.parametrize("layers", some_emulated([1, 2], [2]))
def test_many_levels(layers, device, emulated, kernel):
    """70 levels need more than one word of bits; CUDA's limit is 64."""
    options = dict(num_layers=layers, sliding_windows=(None,) * layers)
    head = head_of("p-eagle", vocab_size=500, draft_vocab_size=500, **options)
    tree = TreeConfig(9 if emulated else 64 if kernel else 70)
    ours = OpRun.start(head, rows=2, capacity=200, device=device)
    theirs = Run.start(head, rows=2, capacity=200)
    for new in (5, 2):
        tokens, features = elements(head, 2, new)
        assert_same_draft(*(run.draft(tree, tokens, features) for run in (ours, theirs)))


def test_worked_example(device):
    """An EAGLE-1 head that sees only the last token: its layer adds nothing, its fc keeps the embedding, and
    the embedding of token t is the unit vector t."""
    probabilities = torch.tensor(
        [[0.1, 0.9, 0, 0], [0, 0.3, 0.6, 0.1], [0.02, 0, 0.08, 0.9], [1.0, 0, 0, 0]]
    )
    sizes = dict(hidden_size=4, target_hidden_size=4, vocab_size=4, draft_vocab_size=4)
    head = head_of("eagle1", fc_bias=False, **sizes)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in head.tensors.items()}
    tensors["fc.weight"] = torch.eye(4, 8)
    run = OpRun.start(
        DraftHead(head.config, tensors),
        device=device,
        rows=1,
        embedding=torch.eye(4),
        lm_head=probabilities.log().nan_to_num(neginf=-200.0).T.contiguous(),
    )
    tree = TreeConfig(depth=3, top_k=2, num_nodes=6)
    tokens, parents, scores = run.draft(tree, torch.tensor([[0]]), torch.zeros(1, 1, 4))
    # 0 ┬ 1 (.9) ┬ 2 (.54) ┬ 3 (.486)
    #   │          │         └ 2 (.0432)
    #   │          └ 1 (.27) ┬ 2 (.162)
    #   │                    └ 1 (.081)
    #   └ 0 (.1) ┬ 1 (.09)
    #            └ 0 (.01)
    assert tokens[0].tolist() == [0, 1, 2, 1, 3, 2]
    assert parents[0].tolist() == [-1, 0, 1, 1, 2, 3]
    expected = torch.tensor([1, 0.9, 0.54, 0.27, 0.486, 0.162])
    torch.testing.assert_close(scores[0].exp(), expected)


def test_equal_scores_go_to_the_lower_token(device):
    """Also across the blocks of 384 tokens of lm_head; one of the two signs gives the better scores."""
    head = head_of("eagle3", vocab_size=2000, draft_vocab_size=1500)
    drafts = []
    for sign in (1, -1):
        lm_head = torch.zeros(1500, head.config.hidden_size)
        lm_head[[1499, 700, 399, 3]] = sign * torch.ones(24)
        lm_head[5] = -sign * torch.ones(24)
        tied = DraftHead(head.config, {**head.tensors, "lm_head.weight": lm_head})
        run = OpRun.start(tied, 1, device=device)
        tokens, _, _ = run.draft(TreeConfig(1, 6, 7), *elements(head, 1, 3))
        drafts.append(tokens[0, 1:].tolist())
    expected = [[3, 399, 700, 1499, 0, 1], [5, 0, 1, 2, 4, 6]]
    tokens = head.tensors["draft_to_target"][torch.tensor(expected)]
    assert sorted(drafts) == sorted(tokens.tolist())


def test_equal_scores_of_a_level_go_to_the_lower_candidate(device):
    """Three tokens share all probability at every node: the first three of nine equal candidates are kept."""
    head = head_of("eagle3")
    lm_head = torch.full((61, head.config.hidden_size), torch.nan)
    lm_head[:3] = 0
    tied = DraftHead(head.config, {**head.tensors, "lm_head.weight": lm_head})
    run = OpRun.start(tied, 1, device=device)
    _, parents, _ = run.draft(TreeConfig(3, 3, 22), *elements(head, 1, 3))
    expected = [node for level in ([0], [1, 2, 3], [4, 5, 6]) for node in level for _ in range(3)]
    assert parents[0].tolist() == [-1, *expected]


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_emulated(
        itertools.product(KINDS, [torch.bfloat16, torch.float16]),
        {("eagle3.1", torch.bfloat16), ("eagle1", torch.float16)},
    ),
    ids=str,
)
def test_error_in_16_bits_is_at_most_twice_the_references(name, dtype, device, emulated, kernel):
    """A tree with all paths over a vocabulary of 3 is the same in every dtype, up to the order of siblings.
    The mean error is compared, because the largest one is that of a single path."""
    if dtype == torch.float16 and not kernel:
        pytest.skip("not on the CPU")
    paths = [path for n in (1, 2, 3) for path in itertools.product(range(3), repeat=n)]
    tree = TreeConfig(choices=paths)
    errors: dict[str, list[float]] = {"op": [], "reference": []}
    for seed in range(2 if emulated else 6):
        sizes = dict(hidden_size=264, target_hidden_size=264, vocab_size=7, draft_vocab_size=3)
        head = head_of(name, seed, dtype, own_lm_head=True, **sizes)
        embedding = torch.randn(7, head.config.hidden_size, generator=generator(seed)).to(dtype)
        exact_head = head.to("cpu", torch.float64)
        runs = {
            "op": OpRun.start(head, 1, embedding=embedding, device=device),
            "reference": Run.start(head, 1, embedding=embedding),
            "exact": Run.start(exact_head, 1, embedding=embedding.double()),
        }
        tokens, features = elements(head, 1, 12, seed)
        scores = {
            key: path_scores(run.draft(tree, tokens, features.to(run.embedding.dtype)))
            for key, run in runs.items()
        }
        exact = scores.pop("exact")
        for key, ours in scores.items():
            assert ours.keys() == exact.keys()
            errors[key] += [abs(ours[path] - exact[path]) for path in exact]
    assert sum(errors["op"]) <= 2 * sum(errors["reference"])


@pytest.mark.parametrize(
    ("name", "tree", "dtype"),
    some_emulated(
        itertools.product(
            ["eagle1-two-layers", "mtp", "eagle3.1", "qk-norm-window", "p-eagle"],
            ["chain", "static", "dynamic"],
            [*DTYPES, torch.float16],
        ),
        {
            ("qk-norm-window", "chain", torch.bfloat16),
            ("p-eagle", "static", torch.float32),
            ("qk-norm-window", "chain", torch.float16),
        },
    ),
    ids=str,
)
def test_a_row_does_not_depend_on_the_others(name, tree, dtype, device, rounds, kernel):
    if dtype == torch.float16 and not kernel:
        pytest.skip("not on the CPU")
    head = head_of(name, dtype=dtype)
    check_rows_are_independent(head, SHAPES[tree], rounds, device=device)


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_emulated(
        itertools.product(
            ["eagle1", "eagle1-two-layers", "mtp", "eagle3", "qk-norm-window", "p-eagle"], DTYPES
        ),
        {("qk-norm-window", torch.bfloat16)},
    ),
    ids=str,
)
def test_elements_in_several_calls_equal_one_call(name, dtype, device, emulated):
    """Trees between the calls leave keys and values in the cache."""
    head = head_of(name, dtype=dtype)
    ends = [0, 1, 34, 35] if emulated else [0, 1, 2, 40, 41, 99, 100]
    tokens, features = elements(head, 2, ends[-1])
    whole, parts = (OpRun.start(head, rows=2, device=device) for _ in range(2))
    expected = whole.draft(SHAPES["dynamic"], tokens, features)
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        tree = SHAPES["dynamic"] if end == ends[-1] else SHAPES[("static", "chain", "wide")[i % 3]]
        drafted = parts.draft(tree, tokens[:, begin:end], features[:, begin:end])
    assert_equal_drafts(drafted, expected)
    for ours, theirs in zip(committed(parts), committed(whole), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("weights", ["same", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_the_result(dtype, weights):
    sizes = dict(hidden_size=128, intermediate_size=512, vocab_size=3000, draft_vocab_size=3000)
    head = head_of("eagle3", dtype=dtype, **sizes)
    tokens, features = elements(head, 4, 40)

    def draft() -> tuple[Tensor, ...]:
        return OpRun.start(head, rows=4, weights=weights).draft(SHAPES["dynamic"], tokens, features)

    expected = draft()
    with two_threads():
        for _ in range(10):
            assert_equal_drafts(draft(), expected)


@pytest.mark.parametrize("name", some_emulated(["eagle3.1", "qk-norm-window"], ["eagle3.1"]))
def test_strides_do_not_change_the_result(name, device, kernel):
    """Any strides, on CUDA those of rows at multiples of 16 bytes; nothing around them is read or written."""
    head = head_of(name)
    gap = 4 if kernel else 1
    tokens, features = elements(head, 3, 6)
    run, strided = (OpRun.start(head, rows=3, device=device) for _ in range(2))
    expected = run.draft(STATIC, tokens, features)
    layers, rows, kv_heads, capacity, head_dim = run.keys.shape
    wide = torch.full((capacity, rows, 2, layers, kv_heads, head_dim + 3 * gap), 7.0, device=device)
    wide[..., gap : gap + head_dim] = torch.nan
    strided.keys, strided.values = wide.permute(2, 3, 1, 4, 0, 5)[..., gap : gap + head_dim]
    width = features.shape[2]
    everywhere = torch.full((6, 2, 3, width + 5 * gap), torch.nan, device=device)
    everywhere[:, 1, :, gap : gap + width] = features.transpose(0, 1)
    columns = torch.full((6, 7), -1, device=device)
    columns[:, 2:5] = tokens.T
    tables = torch.full((2, *run.cosines.shape[:1], run.cosines.shape[1] + 1), torch.nan)
    tables[:, :, 1:] = torch.stack([run.cosines, run.sines])
    cosines, sines = tables.to(device)[:, :, 1:]
    numbers = torch.full((3, 4), 6, device=device)
    numbers[:, 1] = 0
    numbers[:, 3] = tokens[:, -1]
    caches, elements_ = (strided.keys, strided.values), everywhere[:, 1, :, gap : gap + width]
    rows = [columns[:, 2:5].T, elements_.transpose(0, 1), *(numbers[:, i] for i in (2, 1, 1, 3))]
    drafted = ops.draft_head(strided.packed, cosines, sines, *caches, *rows, STATIC)
    strided.lengths += 6
    assert_equal_drafts([each.cpu() for each in drafted], expected)
    for ours, theirs in zip(committed(strided), committed(run), strict=True):
        assert torch.equal(ours, theirs)
    assert (wide[..., :gap] == 7).all() and (wide[..., gap + head_dim :] == 7).all()


def test_only_slots_of_the_draft_are_written(device):
    """The slots of the new elements, and one slot for each of the 5 nodes below the root with children."""
    head = head_of("eagle3")
    tokens, features = elements(head, 2, 3)
    run = OpRun.start(head, rows=2, capacity=12, device=device)
    run.lengths = torch.tensor([2, 4])
    run.keys[:, :, :, :4] = run.values[:, :, :, :4] = 0
    before = run.keys.clone()
    run.draft(STATIC, tokens, features, torch.tensor([2, 3]))
    changed = ~((run.keys == before) | (run.keys.isnan() & before.isnan())).all(-1).all(2)[0]
    assert changed[0].nonzero().flatten().tolist() == [2, 3, *range(4, 9)]
    assert changed[1].nonzero().flatten().tolist() == [4, 5, 6, *range(7, 12)]


def test_first_position_does_not_matter(device):
    """Rotations are relative."""
    head = head_of("eagle3")
    runs = [OpRun.start(head, 2, first_position=first, device=device) for first in (0, 300)]
    assert_same_draft(*(run.draft(STATIC, *elements(head, 2, 8)) for run in runs))


@pytest.mark.parametrize(
    ("name", "tree"),
    some_emulated(
        itertools.product(
            ["eagle1-two-layers", "eagle3", "p-eagle"], ["chain", "static", "dynamic"]
        ),
        {("eagle3", "dynamic")},
    ),
)
def test_row_with_nan_features_drafts_nothing(name, tree, device):
    head = head_of(name)
    tokens, features = elements(head, 3, 5)
    expected = OpRun.start(head, rows=3, device=device).draft(SHAPES[tree], tokens, features)
    features[1, 2] = torch.nan
    drafted = OpRun.start(head, rows=3, device=device).draft(SHAPES[tree], tokens, features)
    for row in (0, 2):
        assert_equal_drafts([each[row] for each in drafted], [each[row] for each in expected])
    assert drafted[0][1].tolist() == [tokens[1, -1], *[0] * (len(drafted[0][1]) - 1)]
    assert drafted[1][1].tolist() == [-1, *[-2] * (len(drafted[0][1]) - 1)]
    assert drafted[2][1].tolist() == [0.0, *[-torch.inf] * (len(drafted[0][1]) - 1)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_tokens_with_infinite_or_nan_logits_are_not_drafted(value, device):
    """As in the specification."""
    head = head_of("eagle3")
    run = OpRun.start(head, rows=1, device=device)
    best = run.draft(TreeConfig(1, 3, 4), *elements(head, 1, 4))[0][0, 1]
    row = (head.tensors["draft_to_target"] == best).nonzero().item()
    head.tensors["lm_head.weight"][row] = value
    drafts = drafts_of(head, SHAPES["dynamic"], new=4, device=device)
    assert_same_draft(*drafts)
    assert best not in drafts[0][0][0, 1:]


@pytest.mark.parametrize("tree", some_emulated(SHAPES, ["static", "dynamic"]))
def test_head_of_nan_drafts_nothing(tree, device):
    head = head_of("eagle3")
    for tensor in head.tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    run = OpRun.start(head, rows=2, device=device)
    _, parents, _ = run.draft(SHAPES[tree], *elements(head, 2, 4))
    assert (parents[:, 1:] == -2).all()


@pytest.mark.slow_emulated
def test_candidates_of_probability_zero_are_absent(device):
    head = head_of("eagle3", vocab_size=9, draft_vocab_size=9)
    lm_head = head.tensors["lm_head.weight"]
    lm_head[2:] = -torch.inf  # times both signs: NaN, no candidates
    for tree in SHAPES.values():
        assert_same_draft(*drafts_of(head, tree, rows=2, new=4, device=device))


@pytest.mark.parametrize("sureness", [0.5, 2.0, 6.0])
def test_small_tree_has_the_best_nodes_of_a_large_one(sureness):
    """The CPU op does not expand nodes that can't be selected; in the largest tree all are selected."""
    head = head_of("eagle3")
    head.tensors["lm_head.weight"] *= sureness
    rows, candidates = 3, 30

    def draft(nodes: int) -> list[dict[tuple[int, ...], float]]:
        drafted = OpRun.start(head, rows).draft(TreeConfig(4, 3, nodes), *elements(head, rows, 2))
        return [path_scores(tuple(each[[row]] for each in drafted)) for row in range(rows)]

    whole = draft(candidates + 1)
    for nodes in range(2, candidates + 1):
        for paths, all_paths in zip(draft(nodes), whole, strict=True):
            best = sorted(all_paths.items(), key=lambda item: -item[1])[:nodes]
            assert paths == dict(best)


@pytest.mark.parametrize(("rows", "new"), [(0, 3), (2, 0), (0, 0)])
def test_without_new_elements_only_the_root_is_drafted(rows, new, device):
    head = head_of("eagle3")
    run = OpRun.start(head, rows, device=device)
    tokens, parents, scores = run.draft(STATIC, *elements(head, rows, new))
    assert tokens.shape == parents.shape == scores.shape == (rows, 11)
    assert (parents[:, 0] == -1).all() and (parents[:, 1:] == -2).all()


@pytest.mark.parametrize("case", some_emulated(TREES, ["eagle3_target_hidden_differs"]))
def test_trees_are_those_of_the_eagle_authors(case, device):
    check_golden_trees(golden_run(OpRun, case, torch.float32, device=device), case)


@pytest.mark.parametrize("case", some_emulated(CHAINS, ["speculators_eagle31_fcnorm_normout"]))
def test_chains_are_those_of_speculators(case, device):
    check_golden_chain(golden_run(OpRun, case, torch.float32, device=device), case)


def isa_results() -> list[tuple[Tensor, ...]]:
    heads = [head_of(name, dtype=d) for d in DTYPES for name in ("qk-norm-window", "p-eagle")]
    return [
        OpRun.start(head, 2, weights=weights).draft(SHAPES["dynamic"], *elements(head, 2, 40))
        for weights in ("same", "int8")
        for head in heads
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["eagle1", "p-eagle"])
def test_opcheck(name, device):
    head = head_of(name)
    tokens, features = elements(head, 2, 4)
    run = OpRun.start(head, rows=2, device=device)
    arguments = run.arguments(tokens, features, torch.tensor([4, 2]))
    packed = arguments.pop("head")
    tensors = [tensor.nan_to_num() for tensor in arguments.values()]
    trees = ((((0, 0), (1, 0)), 2, 1, 3, [1, 2], [1, 1]), ((), 2, 2, 5, [], []))
    for links, *numbers in trees:
        choices = torch.tensor(links, dtype=torch.long, device=device).view(-1, 2)
        head_arguments = packed.weights, packed.layout, packed.scalars
        given = (*head_arguments, *tensors, choices, *numbers, None, packed.sync)
        torch.library.opcheck(torch.ops.specdec.draft_head, given)
