"""``kv_compact``: the op equals its specification byte for byte; nothing else is touched."""

import pytest
import torch
from helpers.ops import emulation
from helpers.ops.op_cases import DEVICES, generator, two_threads

from specdec_ext import ops
from specdec_ext.reference.kv_compact import kv_compact as kv_compact_reference

CASES = {  # name: (batch, nodes, slots, [(heads, head_dim, dtype), ...])
    "one-of-everything": (1, 1, 1, [(1, 1, torch.float32)]),
    "llama-like": (2, 12, 60, [(8, 64, torch.bfloat16)] * 8),
    "mixed": (3, 7, 33, [(1, 3, torch.float16), (4, 5, torch.float64), (2, 17, torch.int8)]),
    "odd-bytes": (5, 19, 40, [(3, 7, torch.uint8)] * 2),
    "many-caches": (2, 5, 16, [(1, 4, torch.float32)] * 131),
    "several-launches": (1, 4, 9, [(1, 1, torch.int8)] * 515),
    "more-layouts-than-a-launch": (2, 3, 8, [(1, 1 + i % 11, torch.int8) for i in range(25)]),
    "max-nodes": (1, ops.MAX_NODES, 1500, [(1, 8, torch.float32)]),
    "no-head-dim": (2, 3, 9, [(2, 0, torch.float32), (0, 4, torch.float32)]),
    "no-caches": (2, 3, 9, []),
    "empty-batch": (0, 3, 9, [(2, 4, torch.float32)]),
}


def random_cache(shape, dtype, seed):
    cache = torch.randint(-100, 100, shape, generator=generator(seed))
    return cache.to(dtype)


def random_moves(batch, nodes, slots, seed):
    """Ascending paths, as of verify_match, between random slots; some rows are inactive."""
    rng = generator(seed)
    path = torch.full((batch, nodes), -1)
    num_accepted = torch.randint(-1, nodes, (batch,), generator=rng)
    for row, accepted in enumerate(num_accepted.tolist()):
        chosen = torch.randperm(nodes, generator=rng)[: accepted + 1].sort().values
        path[row, : accepted + 1] = chosen
    source_starts = torch.randint(0, slots - nodes + 1, (batch,), generator=rng)
    target_starts = torch.randint(0, slots - nodes + 1, (batch,), generator=rng)
    return path, num_accepted, source_starts, target_starts


def assert_same_caches(actual, expected):
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(ours.cpu(), theirs.cpu()), f"caches[{index}]"


@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, device):
    batch, nodes, slots, layout = CASES[case]
    for seed in range(3):
        moves = random_moves(batch, nodes, slots, seed)
        expected = [
            random_cache((batch, heads, slots, dim), dtype, seed) for heads, dim, dtype in layout
        ]
        actual = [cache.clone().to(device) for cache in expected]
        ops.kv_compact(actual, *(move.to(device) for move in moves))
        kv_compact_reference(expected, *moves)
        assert_same_caches(actual, expected)


def test_worked_example(device):
    """Slots hold their own number; nodes 0, 2, 5 of the tree at slot 3 move to 3, 4, 5."""
    cache = torch.arange(10.0, device=device).view(1, 1, 10, 1)
    path = torch.tensor([[0, 2, 5, -1, -1, -1]], device=device)
    accepted, start = torch.tensor([2], device=device), torch.tensor([3], device=device)
    ops.kv_compact([cache], path, accepted, start, start)
    assert cache.flatten().tolist() == [0, 1, 2, 3, 5, 8, 6, 7, 8, 9]


@pytest.mark.parametrize("offset", [-3, -1, 0, 1, 3])
def test_overlapping_ranges_equal_reference(offset, device):
    """Also with a path that is not ascending: all loads come before all stores."""
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        expected = torch.arange(12.0).view(1, 1, 12, 1).repeat(1, 2, 1, 3)
        actual = expected.clone().to(device)
        moves = tuple(map(torch.tensor, ([order], [4], [4], [4 + offset])))
        ops.kv_compact([actual], *(move.to(device) for move in moves))
        kv_compact_reference([expected], *moves)
        assert_same_caches([actual], [expected])


@pytest.mark.parametrize(
    "view",
    [
        lambda c: c[:, :, 1:-1, 2:],
        lambda c: c.transpose(1, 2),
        lambda c: c.transpose(0, 1),
        lambda c: c[::2, 1:2],
        lambda c: c.unflatten(3, (2, 4))[:, 3].movedim(2, 1),
    ],
    ids=["sliced", "slots-first", "heads-first", "every-second-row", "interleaved-heads"],
)
def test_bytes_around_a_strided_cache_are_unchanged(view, device):
    poisoned = torch.full((6, 6, 6, 8), torch.nan)
    expected = poisoned.clone()
    target = view(expected)
    assert target.untyped_storage().data_ptr() == expected.untyped_storage().data_ptr()
    target.copy_(torch.randn(target.shape, generator=generator(0)))
    actual = expected.clone().to(device)
    batch, _, slots, _ = target.shape
    moves = random_moves(batch, min(3, slots), slots, seed=1)
    ops.kv_compact([view(actual)], *(move.to(device) for move in moves))
    kv_compact_reference([view(expected)], *moves)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def scattered(caches, page_size, seed, *, spare=3):
    """The same slots in pools with pages in random order: (pools, page table). Unused pages hold 77."""
    batch, _, slots, _ = caches[0].shape
    row_pages = -(-slots // page_size)
    places = torch.randperm(batch * row_pages + spare, generator=generator(seed))
    page_table = places[: batch * row_pages].view(batch, row_pages)
    pools = []
    for cache in caches:
        heads, head_dim = cache.shape[1], cache.shape[3]
        padded = cache.new_zeros(batch, heads, row_pages * page_size, head_dim)
        padded[:, :, :slots] = cache
        pool = cache.new_full((len(places), heads, page_size, head_dim), 77)
        pool[page_table] = padded.unflatten(2, (row_pages, page_size)).transpose(1, 2)
        pools.append(pool)
    return pools, page_table


@pytest.mark.parametrize("page_size", [1, 3, 16, 100])
@pytest.mark.parametrize("case", ["one-of-everything", "llama-like", "odd-bytes", "max-nodes"])
def test_paged_caches_equal_static_ones(case, page_size, device):
    batch, nodes, slots, layout = CASES[case]
    moves = random_moves(batch, nodes, slots, seed=page_size)
    static = [
        random_cache((batch, heads, slots, dim), dtype, page_size) for heads, dim, dtype in layout
    ]
    pools, page_table = scattered(static, page_size, seed=1)
    pools = [pool.to(device) for pool in pools]
    ops.kv_compact(pools, *(move.to(device) for move in moves), page_table.to(device))
    kv_compact_reference(static, *moves)
    assert_same_caches(pools, scattered(static, page_size, seed=1)[0])


@pytest.mark.parametrize("offset", [-5, -2, 0, 2, 5])
def test_ranges_that_overlap_across_pages_equal_reference(offset, device):
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [2, 0, 4, 6, 1, 5, 3]):
        pools, page_table = scattered([torch.arange(24.0).view(1, 1, 24, 1)], 4, seed=2)
        expected = [pool.clone() for pool in pools]
        moves = tuple(map(torch.tensor, ([order], [6], [8], [8 + offset])))
        actual = [pool.to(device) for pool in pools]
        ops.kv_compact(actual, *(move.to(device) for move in moves), page_table.to(device))
        kv_compact_reference(expected, *moves, page_table)
        assert_same_caches(actual, expected)


def test_paged_worked_example(device):
    """Pages of 64, the page table [7, 3], and nodes 0, 2, 5 of the tree at slot 100."""
    pool = torch.arange(8 * 64.0, device=device).view(8, 1, 64, 1)
    page_table = torch.tensor([[7, 3]], device=device)
    path = torch.tensor([[0, 2, 5, -1, -1, -1]], device=device)
    two, start = torch.tensor([2], device=device), torch.tensor([100], device=device)
    expected = pool.cpu().clone()
    expected[3, 0, [37, 38]] = pool[3, 0, [38, 41]].cpu()
    ops.kv_compact([pool], path, two, start, start, page_table)
    assert torch.equal(pool.cpu(), expected)


def test_rows_may_share_pages_that_are_only_read(device):
    """Rows with a common prefix; the table is strided and has entries that no slot needs."""
    pool = torch.arange(6 * 4.0, device=device).view(6, 1, 4, 1)
    table = torch.tensor([[5, 9, 0, 9, -1, 9], [5, 9, 3, 9, 10**12, 9]], device=device)[:, ::2]
    path = torch.tensor([[0, 1], [0, 1]], device=device)
    one, source = torch.tensor([1, 1], device=device), torch.tensor([2, 2], device=device)
    ops.kv_compact([pool], path, one, source, source + 3, table)
    assert pool[0].flatten().tolist() == [0, 22, 23, 3]
    assert pool[3].flatten().tolist() == [12, 22, 23, 15]
    assert pool[5].flatten().tolist() == [20, 21, 22, 23]


@pytest.mark.parametrize("device", emulation.PARAMS, indirect=True)
@pytest.mark.parametrize("page", [-1, 4, 2**62, -(2**63)])
@pytest.mark.parametrize("start", [-(2**63), -3, 16, 2**63 - 1])
def test_kernels_skip_illegal_moves(start, page, device):
    """The CPU op raises an error instead. Row 0 has legal moves, row 1 a bad start or a bad page."""
    pool = torch.arange(4 * 8.0).view(4, 1, 8, 1)
    expected = pool.clone()
    expected[2, 0, 0:2] = pool[2, 0, 1:3]
    path, one = torch.tensor([[1, 2, -1], [0, 1, -1]]), torch.tensor([1, 1])
    starts = torch.tensor([0, start])
    legal = torch.tensor([[2, 0], [1, 3]])
    for sources, targets, table in (
        (starts, torch.zeros(2).long(), legal),
        (torch.tensor([0, 3]), starts, legal),
        (torch.tensor([0, 8]), torch.zeros(2).long(), torch.tensor([[2, 0], [1, page]])),
        (torch.zeros(2).long(), torch.tensor([0, 8]), torch.tensor([[2, 0], [1, page]])),
    ):
        actual = [pool.clone()]
        ops.kv_compact(actual, path, one, sources, targets, table)
        assert_same_caches(actual, [expected])


def test_bits_of_nan_are_moved_unchanged(device):
    payload = torch.tensor([0x7FC12345, 0x7F812345, -1], dtype=torch.int32).view(torch.float32)
    cache = payload[:, None].repeat(1, 4)[None, None].contiguous().to(device)
    path = torch.tensor([[2, 9, 0, 9, 1, 9]], device=device)[:, ::2]
    num_accepted = torch.tensor([1, 7], device=device)[::2]
    zero = torch.zeros(2, dtype=torch.long, device=device)[::2]
    ops.kv_compact([cache], path, num_accepted, zero, zero)
    bits = cache[0, 0, :, 0].cpu().view(torch.int32).tolist()
    assert bits == [-1, 0x7FC12345, -1]


def test_threads_do_not_change_the_result():
    moves = random_moves(6, 16, 200, seed=5)
    caches = [random_cache((6, 8, 200, 64), torch.float32, i) for i in range(8)]
    expected = [cache.clone() for cache in caches]
    kv_compact_reference(expected, *moves)
    with two_threads():
        ops.kv_compact(caches, *moves)
    assert_same_caches(caches, expected)


def test_inference_tensors_are_accepted():
    with torch.inference_mode():
        cache = torch.randn(1, 2, 8, 4)
    before = cache.clone()
    path = torch.tensor([[0, 1, 10**12]])  # beyond num_accepted: never read
    one = torch.tensor([1])
    with torch.inference_mode():
        ops.kv_compact([cache], path, one, one, one)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    moves = random_moves(2, 4, 10, seed=0)
    caches = [random_cache((2, 2, 10, 3), torch.float32, i).to(device) for i in range(2)]
    arguments = (caches, *(move.to(device) for move in moves))
    torch.library.opcheck(torch.ops.specdec.kv_compact, arguments)
    page_table = torch.tensor([[1], [0]], device=device)
    torch.library.opcheck(torch.ops.specdec.kv_compact, (*arguments, page_table))


def arguments(**changes):
    valid = {
        "caches": [torch.zeros(1, 2, 8, 4)],
        "path": torch.tensor([[0, 1, 2]]),
        "num_accepted": torch.tensor([2]),
        "source_starts": torch.tensor([4]),
        "target_starts": torch.tensor([4]),
    }
    return {**valid, **changes}


BIG = 2**63 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": torch.zeros(3)}, r"argument path must be torch.int64, got torch.float32"),
        ({"path": torch.zeros(3).long()}, r"argument path must be \[batch, nodes\], got shape \[3\]"),
        ({"num_accepted": torch.tensor(2)}, r"argument num_accepted must be \[batch\] = \[1\], got"),
        ({"caches": [torch.zeros(2, 8, 4)]}, r"argument caches\[0\] must be \[batch, heads, slots"),
        ({"caches": [torch.zeros(1, 1, 8, 4), torch.zeros(2, 1, 8, 4)]},
            r"argument caches\[1\] must have the batch of the other arguments, 1, got shape \[2, 1, 8, 4\]"),
        ({"caches": [torch.zeros(1, 2, 4, 8).transpose(2, 3)]},
            r"argument caches\[0\] must be contiguous in its last dimension, got stride 8"),
        ({"caches": [torch.zeros(1, 1, 8, 4).expand(1, 2, 8, 4)]},
            r"argument caches\[0\] must not be an expanded tensor, got stride 0 in dimension 1"),
        ({"num_accepted": torch.tensor([3])}, r"num_accepted\[0\] = 3; expected -1 .* to 2"),
        ({"num_accepted": torch.tensor([-2])}, r"num_accepted\[0\] = -2; expected -1"),
        ({"path": torch.tensor([[0, -1, 3]])}, r"path\[0, 1\] = -1; expected a node in \[0, 3\)"),
        ({"path": torch.tensor([[0, 1, 3]])}, r"path\[0, 2\] = 3; expected a node in \[0, 3\)"),
        ({"source_starts": torch.tensor([7])}, r"source_starts\[0\] = 7 with path\[0, 1\] = 1 is out"),
        ({"source_starts": torch.tensor([-1])}, r"source_starts\[0\] = -1 with path\[0, 0\] = 0"),
        ({"source_starts": torch.tensor([BIG])}, r"source_starts\[0\] = 9223372036854775807 with"),
        ({"target_starts": torch.tensor([6])}, r"target_starts\[0\] = 6 with 3 slots to move; the"),
        ({"target_starts": torch.tensor([-1])}, r"target_starts\[0\] = -1 with 3 slots to move"),
        ({"target_starts": torch.tensor([BIG])}, r"target_starts\[0\] = 9223372036854775807"),
    ],
)  # fmt: skip
def test_rejects(changes, message):
    with pytest.raises(ValueError, match="specdec::kv_compact: " + message):
        ops.kv_compact(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": torch.zeros(1, 2)}, r"argument page_table must be torch.int64, got"),
        ({"page_table": torch.tensor([0])}, r"argument page_table must be \[batch, pages\], got"),
        ({"page_table": torch.zeros(2, 2).long()},
            r"argument page_table must be \[batch, pages\] = \[1, 2\], got shape \[2, 2\]"),
        ({"caches": [torch.zeros(3, 2, 4, 4), torch.zeros(3, 2, 8, 4)]},
            r"argument caches\[1\] must have the page size of caches\[0\], 4, because they share"),
        ({"caches": [torch.zeros(2, 8, 4)]}, r"argument caches\[0\] must be \[pages, heads, page_"),
        ({"page_table": torch.tensor([[7, 3]])},
            r"page_table\[0, 1\] = 3 holds slot 4; expected a page in \[0, 3\)"),
        ({"page_table": torch.tensor([[0, -1]])}, r"page_table\[0, 1\] = -1 holds slot 4; expected"),
        ({"page_table": torch.tensor([[9, 1]]), "target_starts": torch.tensor([3])},
            r"page_table\[0, 0\] = 9 holds slot 3; expected"),
        (
            {
                "page_table": torch.tensor([[1, 9]]),
                "source_starts": torch.tensor([0]),
                "target_starts": torch.tensor([2]),
            },
            r"page_table\[0, 1\] = 9 holds slot 4; expected",
        ),
        ({"source_starts": torch.tensor([6])}, r"source_starts\[0\] = 6 .* slots 0 to 7"),
        ({"page_table": torch.zeros(1, 0).long()}, r"source_starts\[0\] = 4 with path\[0, 0\]"),
    ],
)  # fmt: skip
def test_rejects_pages(changes, message):
    paged = {"caches": [torch.zeros(3, 2, 4, 4)], "page_table": torch.tensor([[2, 0]])}
    with pytest.raises(ValueError, match="specdec::kv_compact: " + message):
        ops.kv_compact(**arguments(**{**paged, **changes}))


def test_nothing_is_written_when_a_later_row_is_wrong():
    cache = torch.arange(2 * 8.0).view(2, 1, 8, 1)
    before = cache.clone()
    two = torch.tensor([2, 2])
    path = torch.tensor([[0, 1, 2], [0, 1, 2]])
    with pytest.raises(ValueError, match=r"source_starts\[1\] = 9"):
        ops.kv_compact([cache], path, two, torch.tensor([3, 9]), torch.tensor([0, 0]))
    assert torch.equal(cache, before)
