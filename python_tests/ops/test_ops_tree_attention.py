"""``tree_attention``: against its specification, and against itself.

Accuracy: the error against a float64 evaluation of the specification is at most twice that of the
specification in plain PyTorch in the same dtype, plus one unit in the last place of the output.
Invariance: the bits of a node's output depend on the keys that it sees alone, so a node of a tree equals
plain decoding of its path. Slots that no node may see hold NaN.
"""

from dataclasses import replace

import pytest
import torch
from helpers.ops import emulation
from helpers.ops.attention_cases import (
    Shape,
    decode_path,
    paged,
    random_case,
    run,
    static_arguments,
)
from helpers.ops.op_cases import generator, strided, two_threads

from specdec_ext import ops
from specdec_ext.reference.tree_attention import tree_attention as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EMULATED = pytest.mark.parametrize("device", emulation.PARAMS, indirect=True)

SHAPES = {
    "smallest": Shape(prefixes=(0,), nodes=1, heads=1),
    "no-prefix": Shape(prefixes=(0, 0), nodes=7),
    "one-committed": Shape(prefixes=(1,), nodes=3, head_dim=80),
    "tile-edges": Shape(prefixes=(63, 64, 65), nodes=4),
    "split-edges": Shape(prefixes=(127, 128, 255, 256, 257), nodes=3, heads=1, head_dim=96),
    "tree-across-splits": Shape(prefixes=(253,), nodes=20),
    "group-7": Shape(prefixes=(40, 9), nodes=5, heads=14, kv_heads=2),
    "group-16": Shape(prefixes=(70,), nodes=3, heads=16),
    "no-group": Shape(prefixes=(70,), nodes=6, heads=3, kv_heads=3, head_dim=128),
    "two-words": Shape(prefixes=(100,), nodes=67, heads=1),
    "three-splits": Shape(prefixes=(600, 20), nodes=3, kv_heads=2, head_dim=128),
    "longer-splits": Shape(prefixes=(2310,), nodes=2, heads=1),
    "two-row-blocks": Shape(prefixes=(40,), nodes=36, heads=4),
    "dim-24": Shape(prefixes=(40,), nodes=3, head_dim=24),
    "dim-256": Shape(prefixes=(90,), nodes=5, head_dim=256),
}
CPU_SHAPES = {
    "dim-1": Shape(prefixes=(20,), nodes=4, head_dim=1),
    "dim-17": Shape(prefixes=(70, 3), nodes=9, heads=6, kv_heads=2, head_dim=17),
    "dim-300": Shape(prefixes=(70,), nodes=3, head_dim=300),
    "many-nodes": Shape(prefixes=(30,), nodes=200, head_dim=8),
}


def assert_as_accurate_as_torch(arguments: dict, device: str) -> None:
    floats = {n: arguments[n].double() for n in ("query", "key", "value")}
    exact = reference(**{**arguments, **floats})
    plain = reference(**arguments)
    ours = run(arguments, device)
    assert ours.dtype == plain.dtype and ours.shape == plain.shape
    dtype = arguments["query"].dtype
    ulp = torch.finfo(dtype).eps * exact.abs().max() if exact.numel() else 0
    plain_error = (plain.double() - exact).abs().max() if exact.numel() else 0
    error = (ours.double() - exact).abs()
    assert not error.isnan().any()
    assert (error <= 2 * plain_error + ulp).all(), (float(error.max()), float(plain_error))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_accuracy(shape, dtype, device):
    case = random_case(SHAPES[shape], dtype, seed=len(shape))
    assert_as_accurate_as_torch(static_arguments(case), device)


@pytest.mark.parametrize("shape", CPU_SHAPES)
def test_accuracy_of_other_sizes_on_the_cpu(shape):
    for dtype in DTYPES:
        case = random_case(CPU_SHAPES[shape], dtype, illegal=0.1, seed=3)
        assert_as_accurate_as_torch(static_arguments(case), "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        *({"window": 1}, {"window": 3}, {"window": 40}, {"window": 300, "softcap": 5.0}),
        *({"softcap": 30.0}, {"scale": 0.0}, {"scale": 1.0}),
    ],
    ids=str,
)
def test_accuracy_with_options(options, dtype, device):
    shape = Shape(prefixes=(330, 2, 35), nodes=5)
    case = random_case(shape, dtype, illegal=0.1, seed=5)
    arguments = static_arguments(case, window=options.get("window", 0))
    assert_as_accurate_as_torch({**arguments, **options}, device)


@pytest.mark.parametrize("page_size", [1, 16, 37, 256])
def test_paging_changes_no_bit(page_size, device):
    for dtype in DTYPES:
        case = random_case(Shape(prefixes=(70, 10), nodes=5, kv_heads=2), dtype, seed=6)
        arguments = static_arguments(case)
        scattered = paged(arguments, page_size)
        assert torch.equal(run(scattered, device), run(arguments, device))
    assert_as_accurate_as_torch(scattered, device)


def test_worked_example(device):
    """Keys are zero, so a node gets the mean of the values that it sees: a prefix of 1 and 2, the root 4 with
    the children 8 and 16, and an inactive node."""
    value = torch.full((1, 1, 9, 64), torch.nan)
    for slot, number in {1: 1, 2: 2, 4: 4, 5: 8, 6: 16}.items():
        value[:, :, slot] = number
    numbers = dict(prefix_starts=[1], prefix_lengths=[2], block_starts=[4])
    arguments = {
        "query": torch.ones(1, 1, 4, 64),
        "key": torch.zeros(1, 1, 9, 64),
        "value": value,
        "ancestors": torch.tensor([[[0b001], [0b011], [0b101], [0]]]),
        **{name: torch.tensor(value) for name, value in numbers.items()},
    }
    out = run({**arguments, "scale": 1.0}, device)
    assert out[0, :, 0, 0].tolist() == pytest.approx([7 / 3, 15 / 4, 23 / 4, 0])
    assert (out == out[..., :1]).all()


def path_to(case, row, node):
    path = [node]
    while path[0] != 0:
        path.insert(0, int(case.parents[row, path[0]]))
    return path


def two_chains(nodes):
    """The root with two children, each of which begins a chain: nodes 1, 3, 5, ... and 2, 4, 6, ..."""
    return torch.arange(-2, nodes - 2).clamp(min=0).index_fill(0, torch.tensor([0]), -1)[None]


TREE_SHAPES = {
    "across-tiles": Shape(prefixes=(60,), nodes=12, heads=4, kv_heads=2),
    "across-splits": Shape(prefixes=(509, 30), nodes=14, heads=7),
    "two-words": Shape(prefixes=(5,), nodes=70, heads=1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [(0, 0.0), (7, 0.0), (0, 4.0), (259, 20.0)], ids=str)
@pytest.mark.parametrize("shape", TREE_SHAPES)
def test_a_tree_equals_decoding_token_by_token(shape, options, dtype):
    """A tree gives the bits of calls with one node each, after the path was compacted."""
    window, softcap = options
    case = random_case(TREE_SHAPES[shape], dtype, seed=len(shape))
    arguments = {**static_arguments(case, window=window), "softcap": softcap}
    together = run(paged(arguments, 16))
    for row in range(len(case.parents)):
        depths = case.ancestors[row].ne(0).any(-1)
        deepest = [int(depths.nonzero()[-1]), len(depths) // 2]
        for node in deepest:
            path = path_to(case, row, node)
            decoded = decode_path(case, row, node, window, softcap, "cpu")
            assert torch.equal(together[row, path], decoded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [(0, 0.0), (9, 4.0)], ids=str)
def test_two_chains_equal_decoding_token_by_token(options, dtype, device):
    """Interleaved in memory, across the end of a split (a multiple of 128 on CUDA and of 256 on the CPU)."""
    window, softcap = options
    case = replace(random_case(Shape(prefixes=(509,), nodes=9), dtype), parents=two_chains(9))
    together = run({**static_arguments(case, window=window), "softcap": softcap}, device)
    path = path_to(case, 0, 8)
    assert path == [0, 2, 4, 6, 8]
    assert torch.equal(together[0, path], decode_path(case, 0, 8, window, softcap, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefix", [34, 35])
def test_a_prefix_may_end_within_a_pair_of_positions(prefix, dtype, device):
    """1 + 2**24 - 2**24 is 0 in float32 and 1 - 2**24 + 2**24 is 1, so the sum tells the order of positions:
    here of the last two of the prefix and the first node."""
    query = torch.ones(1, 1, 2, 64, dtype=dtype)
    key, value = torch.zeros(2, 1, 1, prefix + 2, 64, dtype=dtype)
    value[0, 0, prefix - 2 : prefix + 1] = torch.tensor([1, 2**24, -(2**24)], dtype=dtype)[:, None]

    def attend(query, ancestors, prefix):
        end = torch.tensor([prefix])
        slots = dict(prefix_starts=end * 0, prefix_lengths=end, block_starts=end)
        tree = dict(query=query, ancestors=torch.tensor([ancestors]))
        return run(dict(**tree, key=key, value=value, **slots, scale=1.0), device)[:, -1]

    decoded = attend(query[:, :, 1:], [[1]], prefix + 1)
    assert torch.equal(attend(query, [[1], [3]], prefix), decoded)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefix", [1020, 2046, 6654])
def test_long_prefixes_equal_decoding_token_by_token(prefix, dtype, device):
    """From positions 2048 and 6144 on, the CUDA kernels' splits are longer. A prefix of 6656 tokens has 33 of
    them, one more than are merged together."""
    case = random_case(Shape(prefixes=(prefix,), nodes=7, heads=1), dtype, seed=3)
    case = replace(case, parents=two_chains(7))
    together = run(static_arguments(case), device)
    decoded = decode_path(case, 0, 6, 0, 0.0, device)
    assert torch.equal(together[0, path_to(case, 0, 6)], decoded)
    assert_as_accurate_as_torch(static_arguments(case), device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_rise_from_split_to_split(dtype, device):
    """Every split has a larger maximum than all before it, so every merge rescales the sums."""
    case = random_case(Shape(prefixes=(6700,), nodes=1, heads=1), dtype, seed=12)
    arguments = {**static_arguments(case), "query": torch.full((1, 1, 1, 64), 0.5, dtype=dtype)}
    slots = torch.arange(arguments["key"].shape[2])[:, None] / 1000
    arguments["key"] = arguments["key"] * 0.01 + slots.to(dtype)
    assert_as_accurate_as_torch(arguments, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype, device):
    case = random_case(Shape(prefixes=(90, 0, 64, 5), nodes=6), dtype, illegal=0.2, seed=4)
    together = run(static_arguments(case), device)
    for row in range(4):
        alone = run(static_arguments(case.only_rows([row]), start=11, gap=0), device)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 150])
def test_the_capacity_of_the_cache_changes_no_bit(window, dtype, device):
    """The kernels' grids depend on the capacity alone, and most of their blocks have nothing to do."""
    case = random_case(Shape(prefixes=(300, 0, 130), nodes=4), dtype, seed=10)
    arguments = static_arguments(case, window=window)
    larger = dict(arguments)
    for name in ("key", "value"):
        larger[name] = torch.nn.functional.pad(arguments[name], (0, 0, 0, 5000), value=torch.nan)
    assert torch.equal(run(larger, device), run(arguments, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_node_does_not_depend_on_later_ones(dtype, device):
    case = random_case(Shape(prefixes=(70,), nodes=36), dtype, seed=8)
    together = run(static_arguments(case), device)
    for count in (1, 33):
        fewer = case.only_nodes(list(range(count)), case.parents[:, :count])
        assert torch.equal(run(static_arguments(fewer), device), together[:, :count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_a_rejected_sibling_does_not_matter(dtype, device):
    case = random_case(Shape(prefixes=(35,), nodes=12), dtype, seed=9)
    arguments = static_arguments(case)
    clean = run(arguments, device)
    for node in (1, 3):
        sees = (case.ancestors[0, :, 0] >> node & 1).bool()
        assert 1 < sees.sum() < 12
        for name in ("key", "value"):
            poisoned = arguments[name].clone()
            poisoned[:, :, arguments["block_starts"][0] + node] = torch.nan
            out = run({**arguments, name: poisoned}, device)
            assert torch.equal(out[0, ~sees], clean[0, ~sees])
            assert out[0, sees].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_window_hides_nan_node_by_node(dtype, device):
    """Position 10 holds NaN: with a window of 4 the nodes at positions up to 13 see it, later ones not."""
    case = random_case(Shape(prefixes=(12,), nodes=6), dtype, seed=1)
    case = replace(case, parents=torch.arange(-1, 5)[None])
    arguments = static_arguments(case, window=4)
    for name in ("key", "value"):
        poisoned = arguments[name].clone()
        poisoned[:, :, arguments["prefix_starts"][0] + 10] = torch.nan
        out = run({**arguments, name: poisoned}, device)
        assert out[0].isnan().flatten(1).any(1).tolist() == [True, True] + [False] * 4


def test_a_window_that_touches_a_split_more_than_its_length_needs(device):
    """On CUDA, positions 127 to 287 are the last of split 0, all of split 1 and a tile of split 2."""
    case = random_case(Shape(prefixes=(288,), nodes=1), seed=3)
    assert_as_accurate_as_torch(static_arguments(case, window=162), device)


def test_a_prefix_that_begins_before_the_cache(device):
    """With a window the cache may have dropped the first positions: prefix_starts is negative."""
    case = random_case(Shape(prefixes=(200,), nodes=5), seed=2)
    arguments = static_arguments(case, start=0, window=50)
    expected = run(arguments, device)
    shifted = dict(arguments)
    for name in ("key", "value"):
        shifted[name] = arguments[name][:, :, 151:]
    for name in ("prefix_starts", "block_starts"):
        shifted[name] = arguments[name] - 151
    assert torch.equal(run(shifted, device), expected)


@pytest.mark.parametrize("active", [[0, 1, 2, 3, 4], [0, 127], [127]], ids=str)
def test_padding_nodes_change_no_bit(active, device):
    """A chain in a tree that is padded to 128 nodes: in blocks of 64 nodes without an active one, or of which
    the last alone is active."""
    case = random_case(Shape(prefixes=(140,), nodes=128), torch.bfloat16, seed=11)
    arguments = static_arguments(case)
    arguments["ancestors"] = torch.zeros(1, 128, 2, dtype=torch.long)
    for depth, node in enumerate(active):
        for ancestor in active[: depth + 1]:
            bit = torch.tensor(1) << ancestor % 64
            arguments["ancestors"][0, node, ancestor // 64] |= bit
    padded = run(arguments, device)
    chain = case.only_nodes(active, torch.arange(-1, len(active) - 1)[None])
    assert torch.equal(padded[:, active], run(static_arguments(chain), device))
    padded[:, active] = 0
    assert (padded == 0).all()


def test_inactive_rows_and_nodes_are_zero(device):
    case = random_case(Shape(prefixes=(30, 30, 30), nodes=5), seed=3)
    case.parents[0] = -2
    case.parents[1, 2] = -2
    out = run(static_arguments(case), device)
    assert (out[0] == 0).all() and (out[1, 2] == 0).all()
    inactive = case.ancestors.eq(0).all(-1)
    assert (out[inactive] == 0).all() and (out[~inactive] != 0).any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_and_nan_scores_are_those_of_pytorch(dtype, device):
    """A NaN or +inf score gives NaN, a score of -inf has no weight, and -inf scores alone give NaN."""
    case = random_case(Shape(prefixes=(100,), nodes=1, heads=1), dtype, seed=3)
    arguments = {**static_arguments(case, start=0), "query": torch.ones(1, 1, 1, 64, dtype=dtype)}

    def out(**slots):
        key = arguments["key"].clone()
        for slot, number in slots.items():
            key[:, :, slice(*map(int, slot[1:].split("_")))] = number
        return run({**arguments, "key": key}, device)

    assert out(s7_8=torch.nan).isnan().all()
    assert out(s7_8=torch.inf).isnan().all()
    assert out(s0_106=-torch.inf).isnan().all()
    rest = {**arguments, **static_arguments(case, start=0, window=101 - 80)}
    torch.testing.assert_close(
        out(s0_80=-torch.inf), run({**rest, "query": arguments["query"]}, device)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_change_the_result(dtype, device):
    """The query is a transposed projection; key and value are halves of one interleaved buffer."""
    case = random_case(Shape(prefixes=(40, 3), nodes=6, heads=4, kv_heads=2), dtype, seed=7)
    arguments = static_arguments(case)
    views = dict(arguments)
    views["query"] = arguments["query"].transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack([arguments["key"], arguments["value"]], dim=3)
    both = both.transpose(1, 2).contiguous().transpose(1, 2)
    views["key"], views["value"] = both[..., 0, :], both[..., 1, :]
    for name in ("ancestors", "prefix_starts", "prefix_lengths", "block_starts"):
        views[name] = strided(arguments[name], "cpu", -99)
    assert torch.equal(run(views, device), run(arguments, device))


def test_splits_may_span_several_waves():
    """The CPU op runs in waves; the splits of a head span several of them."""
    case = random_case(Shape(prefixes=(4500, 1000), nodes=600, heads=16, head_dim=16), seed=1)
    together = run(static_arguments(case))
    for row in (0, 1):
        one = case.only_rows([row]).only_nodes([0], torch.tensor([[-1]]))
        assert torch.equal(run(static_arguments(one))[0, 0], together[row, 0])


def test_threads_do_not_change_the_result():
    case = random_case(Shape(prefixes=(900, 70), nodes=16, heads=8, kv_heads=4, head_dim=128))
    arguments = static_arguments(case)
    expected = run(arguments)
    with two_threads():
        for _ in range(10):
            assert torch.equal(run(arguments), expected)


def isa_results():
    results = []
    for dtype in DTYPES:
        shape = Shape(prefixes=(290, 33), nodes=7, heads=6, kv_heads=2, head_dim=40)
        case = random_case(shape, dtype)
        results.append(run({**static_arguments(case, window=200), "softcap": 9.0}))
    # These are paired, by loops of their own.
    paired = Shape(prefixes=(290, 33), nodes=7, heads=6, kv_heads=2, head_dim=96)
    case = random_case(paired, torch.bfloat16)
    results.append(run({**static_arguments(case, window=200), "softcap": 9.0}))
    for shape in TREE_SHAPES:
        test_a_tree_equals_decoding_token_by_token(shape, (7, 4.0), torch.bfloat16)
    test_nan_in_a_rejected_sibling_does_not_matter(torch.bfloat16, "cpu")
    test_a_window_hides_nan_node_by_node(torch.bfloat16, "cpu")
    assert_as_accurate_as_torch(static_arguments(case), "cpu")
    return results


def test_16_bit_values_are_converted_exactly():
    """A node without a prefix sees only itself, so its output is its value."""
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        values = values[values.isfinite()].view(1, 1, 1, -1)
        case = random_case(Shape(prefixes=(0,), nodes=1, heads=1, head_dim=values.shape[-1]), dtype)
        out = run({**static_arguments(case, start=0, gap=0), "value": values, "key": values * 0})
        assert torch.equal(out, values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_outputs_are_rounded_to_nearest_even(dtype):
    """Two equal keys give the mean of two neighbouring values, which is half way between them. Values that
    underflow or overflow are converted as PyTorch does."""
    rng = generator(0)
    bits = torch.randint(-(2**15), 2**15, (2, 4096), generator=rng, dtype=torch.int32)
    low = bits[0].to(torch.int16).view(dtype)
    high = torch.where(bits[1] % 2 == 0, bits[0] + 1, bits[1]).to(torch.int16).view(dtype)
    fine = low.isfinite() & high.isfinite()
    pair = torch.stack([low, high])[:, fine]
    case = random_case(Shape(prefixes=(1,), nodes=1, heads=1, head_dim=pair.shape[1]), dtype)
    arguments = static_arguments(case, start=0, gap=0)
    shape = (1, 1, 2, pair.shape[1])
    out = run(
        {**arguments, "value": pair.view(shape), "key": torch.zeros(shape, dtype=dtype)[..., :]}
        | {"prefix_starts": torch.tensor([0]), "block_starts": torch.tensor([1])}
    )
    assert torch.equal(out.flatten(), (pair.float().sum(0) / 2).to(dtype))


def test_repeats_have_the_same_bits(device):
    case = random_case(Shape(prefixes=(90,), nodes=5), torch.bfloat16)
    arguments = static_arguments(case)
    expected = run(arguments, device)
    assert all(torch.equal(run(arguments, device), expected) for _ in range(3))


def test_empty_batch(device):
    out = run(static_arguments(random_case(Shape(prefixes=(), nodes=3))), device)
    assert out.shape == (0, 3, 2, 64)


@pytest.mark.parametrize("page_size", [None, 16])
def test_opcheck(page_size):
    arguments = static_arguments(random_case(Shape(prefixes=(20, 3), nodes=4)))
    if page_size:
        arguments = paged(arguments, page_size)
    torch.library.opcheck(torch.ops.specdec.tree_attention, tuple(arguments.values()))


def good_arguments():
    return static_arguments(random_case(Shape(prefixes=(9, 5), nodes=3, heads=4, kv_heads=2)))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda t: t.double(), r"must be torch.float32, .* got torch.float64; convert"),
        ("query", lambda t: t[0], r"must be \[batch, heads, nodes, head_dim\], got shape \[4, 3, 64\]"),
        ("query", lambda t: t[..., ::2], r"must be contiguous in its last .*, got stride 2; call"),
        ("query", lambda t: t[:, :, :0], r"must have 1 to 1024 nodes .* got 0"),
        ("query", lambda t: t[:, :0], r"must have at least 1 head .* got shape \[2, 0, 3, 64\]"),
        ("key", lambda t: t.bfloat16(), r"must be torch.float32, got torch.bfloat16"),
        ("key", lambda t: t[:1], r"must have the batch of query, 2, .*; for pools .* page_table"),
        ("key", lambda t: t[:, :0], r"must have a number of heads that divides the 4 heads"),
        ("key", lambda t: t[..., :32], r"must have the head_dim of query, 64, got shape"),
        ("key", lambda t: t[..., ::2], r"must be contiguous in its last .*, got stride 2; call"),
        ("value", lambda t: t[:, :, :4], r"must be \[batch, kv_heads, slots, head_dim\] = .* got"),
        ("value", lambda t: t.half(), r"must be torch.float32, got torch.float16"),
        ("ancestors", lambda t: t.int(), r"must be torch.int64, got torch.int32"),
        ("ancestors", lambda t: t[:, :2], r"must be \[batch, nodes, words\] = \[2, 3, 1\], got"),
        ("prefix_starts", lambda t: t[:1], r"must be \[batch\] = \[2\], got shape \[1\]"),
        ("prefix_lengths", lambda t: t.float(), r"must be torch.int64, got torch.float32"),
        ("block_starts", lambda t: t[None], r"must be \[batch\] = \[2\], got shape \[1, 2\]"),
        ("page_table", lambda _: torch.zeros(3, 4).long(), r"must have the batch of query, 2, got"),
        ("page_table", lambda _: torch.zeros(2).long(), r"must be \[batch, pages\], got shape \[2\]"),
        ("scale", lambda _: -1.0, r"must be finite and 0 or more, got -1"),
        ("scale", lambda _: float("nan"), r"must be finite and 0 or more, got nan"),
        ("softcap", lambda _: -2.0, r"must be finite and 0 or more \(0: none\), got -2"),
        ("softcap", lambda _: float("inf"), r"must be finite"),
        ("window", lambda _: -1, r"must be 0 \(no window\) or more, got -1"),
    ],
)  # fmt: skip
def test_rejects(name, change, message):
    arguments = good_arguments()
    arguments[name] = change(arguments[name])
    if name == "query" and arguments["query"].shape[-1:] == (32,):
        arguments["key"] = arguments["value"] = arguments["key"][..., :32]
    if name == "key":
        same = arguments["key"].dtype.itemsize == 4
        arguments["value"] = arguments["key"] if same else arguments["value"]
    with pytest.raises(ValueError, match=rf"specdec::tree_attention: argument {name} {message}"):
        run(arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix_starts": [3, -1]}, r"the prefix of row 1 would read slots -1 to 3; .* \[0, 22\)"),
        ({"prefix_lengths": [9, 50]}, r"the prefix of row 1 would read slots 4 to 53; expected"),
        ({"prefix_lengths": [-1, 5]}, r"prefix_lengths\[0\] = -1; expected 0 or more"),
        ({"prefix_lengths": [2**63 - 1, 5]}, r"prefix_lengths\[0\] = \d+; expected -2\^60 to"),
        (
            {"prefix_lengths": [2**60 + 1, 5], "prefix_starts": [2**63 - 2**60 - 1, 0]},
            r"prefix_lengths\[0\] = \d+; expected -2\^60 to",
        ),
        ({"prefix_starts": [0, 2**63 - 1]}, r"prefix_starts\[1\] = \d+; expected -2\^60 to"),
        ({"block_starts": [17, 2**63 - 1]}, r"block_starts\[1\] = \d+; expected -2\^60 to"),
        ({"block_starts": [17, 20]}, r"the tree of row 1 would read slots 20 to 22; expected"),
        ({"block_starts": [-1, 14]}, r"the tree of row 0 would read slots -1 to 1; expected"),
    ],
    ids=str,
)
def test_rejects_slots_outside_the_cache(change, message):
    arguments = good_arguments() | {name: torch.tensor(value) for name, value in change.items()}
    with pytest.raises(ValueError, match=f"specdec::tree_attention: {message}"):
        run(arguments)


def test_rejects_pages_outside_the_pool_and_nodes_outside_the_tree():
    arguments = paged(good_arguments(), 8)
    pages = len(arguments["key"])
    for entry in (-1, pages):
        table = arguments["page_table"].clone()
        table[1, 1] = entry
        with pytest.raises(ValueError, match=rf"page_table\[1, 1\] = {entry}; .* \[0, {pages}\)"):
            run({**arguments, "page_table": table})
    ancestors = arguments["ancestors"].clone()
    ancestors[0, 2] |= 8
    with pytest.raises(ValueError, match=r"ancestors\[0\] names node 3; expected nodes in \[0, 3"):
        run({**arguments, "ancestors": ancestors})


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (Shape((3,), nodes=129, heads=1), torch.float32, r"query has 129 nodes; .* take up to 128"),
        (Shape((3,), 2, head_dim=264), torch.half, r"query has 264 dimensions per head; .* up to 256"),
        (Shape((3,), 2, heads=17), torch.half, r"query has 17 heads per key-value head; .* up to 16"),
        (Shape((3,), 2, head_dim=68), torch.half, r"query has 68 dimensions per head; .* multiples of 8"),
    ],
    ids=str,
)  # fmt: skip
@EMULATED
def test_limits_of_the_kernels(shape, dtype, message, device):
    """The op raises the sentence that ``tree_attention_refusal`` returns before the call."""
    arguments = static_arguments(random_case(shape, dtype))
    with pytest.raises(ValueError, match=f"specdec::tree_attention: argument {message}") as raised:
        run(arguments, device)
    _, heads, nodes, head_dim = arguments["query"].shape
    sizes = dtype, nodes, head_dim, heads // arguments["key"].shape[1]
    refusal = ops.tree_attention_refusal(torch.device("cuda"), *sizes)
    assert str(raised.value) == f"specdec::tree_attention: argument query {refusal}"
    assert ops.tree_attention_refusal(torch.device("cpu"), *sizes) is None


@EMULATED
def test_kernels_need_aligned_rows(device):
    arguments = static_arguments(random_case(Shape((3,), 2), torch.half))
    wide = torch.zeros(*arguments["key"].shape[:3], 65, dtype=torch.half)
    with pytest.raises(ValueError, match=r"argument key must begin every row at a multiple of 16"):
        run({**arguments, "key": wide[..., 1:]}, device)
