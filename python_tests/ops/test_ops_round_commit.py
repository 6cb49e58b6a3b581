"""``round_commit``: all that it writes equals its specification; nothing else is touched."""

import pytest
import torch
from helpers.ops import emulation
from helpers.ops.op_cases import DEVICES, generator

from specdec_ext import ops
from specdec_ext.ops import RoundEntry, RoundNumbers
from specdec_ext.reference.round_commit import round_commit as round_commit_reference

NAMES = (
    "caches", "tokens", "verdict", "eos", "numbers", "text", "new_tokens", "ring", "clock",
    "features", "new_features",
)  # fmt: skip
HALF, BYTE = torch.bfloat16, torch.uint8
CASES = {  # name: (batch, nodes, [(heads, head_dim, dtype), ...], [feature width, ...], feature dtype)
    "one-of-everything": (1, 1, [(1, 1, torch.float32)], [1], torch.float32),
    "llama-like": (2, 12, [(8, 64, HALF)] * 8, [96, 96, 96], HALF),
    "odd": (5, 19, [(3, 7, BYTE), (2, 17, torch.int8)], [5, 1], torch.float32),
    "many-rows": (37, 3, [(1, 4, torch.float32)], [], None),
    "several-launches": (2, 4, [(1, 1, torch.int8)] * 515, [3], HALF),
    "more-layouts-than-a-launch": (2, 3, [(1, 1 + i % 11, BYTE) for i in range(25)], [8], HALF),
    "max-nodes": (2, ops.MAX_NODES, [(1, 8, torch.float32)], [8], torch.float32),
    "eight-features": (3, 7, [(2, 4, HALF)], [1, 2, 3, 4, 5, 6, 7, 8], HALF),
    "no-caches": (3, 7, [], [16], torch.float32),
    "empty-caches": (3, 7, [(2, 0, HALF), (0, 4, HALF)], [], None),
    "empty-batch": (0, 3, [(2, 4, torch.float32)], [4], torch.float32),
}
EOS, VOCAB, COLUMNS, ENTRIES = (7, 3), 40, 60, 3


def random_verdict(batch, nodes, rng, inactive=0.2):
    """Ascending paths, as of verify_match; some rows are inactive."""
    path = torch.full((batch, nodes), -1)
    accepted = torch.randint(0, nodes, (batch,), generator=rng)
    accepted[torch.rand(batch, generator=rng) < inactive] = -1
    for row, count in enumerate(accepted.tolist()):
        if count >= 0:
            below = torch.randperm(nodes - 1, generator=rng)[:count].sort().values + 1
            path[row, : count + 1] = torch.cat([torch.zeros(1).long(), below])
    next_token = torch.randint(0, VOCAB, (batch,), generator=rng)
    status = torch.zeros(batch).long()
    return torch.cat([path.flatten(), accepted, next_token, status])


def random_round(case, seed, **changes):
    """Arguments of the op by name, with unused memory full of NaN or of numbers that are no index."""
    batch, nodes, layout, widths, dtype = CASES[case]
    rng = generator(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=rng)

    verdict = random_verdict(batch, nodes, rng)
    first, lengths = integers(0, 5, batch), integers(1, 20, batch)
    ends = first + lengths
    start = int(ends.max()) if batch else 0
    slots = start + nodes + 2
    columns = COLUMNS + nodes
    text_lengths = integers(1, COLUMNS - 3, batch)
    limits = (text_lengths + integers(1, 2 * nodes + 3, batch)).clamp(max=columns)
    active = torch.where(verdict[batch * nodes :][:batch] >= 0, -1, -2)
    numbers = RoundNumbers(
        lengths + 100, ends, first, lengths, torch.full_like(ends, start),
        integers(0, VOCAB, batch), active, text_lengths, limits,
        integers(0, 9, batch),
    )  # fmt: skip
    caches = [
        torch.randint(-100, 100, (batch, heads, slots, dim), generator=rng).to(kind)
        for heads, dim, kind in layout
    ]
    features = [torch.randn(batch, nodes, width, generator=rng).to(dtype) for width in widths]
    new_features = None
    if features:
        new_features = torch.full((batch, nodes + 1, sum(widths)), torch.nan, dtype=dtype)
    arguments = dict(
        caches=caches,
        tokens=integers(0, VOCAB, batch, nodes),
        verdict=verdict,
        eos=torch.tensor(EOS),
        numbers=torch.stack(numbers),
        text=torch.full((batch, columns), -77),
        new_tokens=torch.full((batch, nodes + 2), -88),
        ring=torch.full((ENTRIES, RoundEntry.size(batch, nodes) + 3), -99),
        clock=torch.tensor([5, 0], dtype=torch.int32),
        features=features,
        new_features=new_features,
    )
    return {**arguments, **changes}


def mapped(arguments, change):
    return {
        name: [*map(change, value)]
        if isinstance(value, list)
        else value
        if value is None
        else change(value)
        for name, value in arguments.items()
    }


def to(device, arguments):
    return mapped(arguments, lambda tensor: tensor.clone().to(device))


def assert_same(actual, expected):
    for name in NAMES:
        ours, theirs = actual[name], expected[name]
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]
        for mine, other in pairs:
            if other is not None:
                torch.testing.assert_close(
                    mine.cpu(),
                    other,
                    rtol=0,
                    atol=0,
                    equal_nan=True,
                    msg=f"{name}\n{mine}\n{other}",
                )


def check(arguments, device):
    expected, actual = to("cpu", arguments), to(device, arguments)
    round_commit_reference(**expected)
    ops.round_commit(**actual)
    assert_same(actual, expected)
    return actual


@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, device):
    for seed in range(3):
        check(random_round(case, seed), device)


def test_rounds_follow_each_other(device):
    """The state of one round is the input of the next; the entries wrap around the ring."""
    case = "llama-like"
    batch, nodes, layout, *_ = CASES[case]
    rng = generator(4)
    expected = random_round(case, 4)
    slots = COLUMNS + 10 * nodes
    expected["caches"] = [
        torch.randn(batch, heads, slots, dim, generator=rng).to(kind) for heads, dim, kind in layout
    ]
    actual = to(device, expected)
    for number in range(6, 6 + 2 * ENTRIES):
        verdict = random_verdict(batch, nodes, rng, inactive=0)
        ended = expected["numbers"][6] == -2
        verdict[batch * nodes :][:batch][ended] = -1
        tokens = torch.randint(8, VOCAB, (batch, nodes), generator=rng)
        tokens[0, nodes // 2] = EOS[0]
        for arguments in (expected, actual):
            arguments["verdict"].copy_(verdict)
            arguments["tokens"].copy_(tokens)
        round_commit_reference(**expected)
        ops.round_commit(**actual)
        assert_same(actual, expected)
        row = (number - 1) % ENTRIES
        assert RoundEntry.of(actual["ring"][row].cpu(), batch, nodes).round == number


def example(device, verdict, *, tokens=(10, 11, 12, 13), limit=20, parents=-1, status=0):
    """One row whose text has four tokens, slots hold their own number, and node i has feature i."""
    path, accepted, following = verdict
    path = [*path, *[-1] * (4 - len(path))]
    arguments = dict(
        caches=[torch.arange(12.0).view(1, 1, 12, 1)],
        tokens=torch.tensor([tokens]),
        verdict=torch.tensor([*path, accepted, following, status]),
        eos=torch.tensor([99]),
        numbers=torch.tensor([[3], [3], [0], [3], [5], [tokens[0]], [parents], [4], [limit], [1]]),
        text=torch.arange(20)[None].clone(),
        new_tokens=torch.zeros(1, 4).long(),
        ring=torch.zeros(2, RoundEntry.size(1, 4)).long(),
        clock=torch.zeros(2, dtype=torch.int32),
        features=[torch.arange(4.0).view(1, 4, 1)],
        new_features=torch.full((1, 4, 1), -1.0),
    )
    arguments = to(device, arguments)
    ops.round_commit(**arguments)
    entry = RoundEntry.of(arguments["ring"][0], 1, 4)
    return mapped(arguments, lambda tensor: tensor.flatten().tolist()), entry


def test_worked_example(device):
    """Nodes 0, 2 and 3 of a tree at slot 5 move to slot 3; the walk ends with token 50."""
    state, entry = example(device, ([0, 2, 3], 2, 50))
    assert state["caches"][0] == [0, 1, 2, 5, 7, 8, 6, 7, 8, 9, 10, 11]
    assert state["text"][:8] == [0, 1, 2, 3, 12, 13, 50, 7]
    assert state["numbers"] == [6, 6, 0, 6, 6, 50, -1, 7, 20, 3]
    assert state["new_tokens"] == [12, 13, 50, 0]
    assert state["new_features"] == [0, 2, 3, -1]
    assert state["clock"] == [1, 0]
    assert entry == (1, [3], [2], [False], [0], [[12, 13, 50, -1]], [[0, 2, 3, -1]])


@pytest.mark.parametrize(
    ("verdict", "tokens", "limit", "emitted"),
    [
        (([0, 2, 3], 2, 50), (10, 11, 99, 13), 20, [99]),
        (([0, 2, 3], 2, 50), (10, 11, 12, 99), 20, [12, 99]),
        (([0, 2, 3], 2, 99), (10, 11, 12, 13), 20, [12, 13, 99]),
        (([0], 0, 99), (99, 99, 99, 99), 20, [99]),
        (([0, 2, 3], 2, 50), (10, 11, 12, 13), 5, [12]),
        (([0, 2, 3], 2, 50), (10, 11, 12, 13), 6, [12, 13]),
        (([0, 2, 3], 2, 50), (10, 11, 12, 13), 7, [12, 13, 50]),
    ],
)
def test_row_ends(verdict, tokens, limit, emitted, device):
    """At an end-of-sequence token, drafted or not, or at the limit. The end of its cache is not moved on."""
    state, entry = example(device, verdict, tokens=tokens, limit=limit)
    count = len(emitted)
    assert entry.ended == [True] and entry.counts == [count]
    assert entry.tokens == [[*emitted, *[-1] * (4 - count)]]
    assert state["numbers"] == [
        3 + count,
        3 + count,
        0,
        3 + count,
        3 + count,
        emitted[-1],
        -2,
        4 + count,
        limit,
        count,
    ]
    assert state["text"][: 4 + count + 1] == [0, 1, 2, 3, *emitted, 4 + count]
    moved = [5, 7, 8][:count]
    assert state["caches"][0] == [0, 1, 2, *moved, *range(3 + count, 12)]
    assert state["new_features"] == [*[0, 2, 3][:count], *[-1] * (4 - count)]


@pytest.mark.parametrize("case", ["llama-like", "many-rows", "several-launches"])
def test_round_with_a_status_is_void(case, device):
    arguments = random_round(case, 7)
    arguments["verdict"][-2] = 1
    actual = check(arguments, device)
    batch, nodes, *_ = CASES[case]
    for name in ("caches", "text", "new_tokens", "new_features"):
        before, after = arguments[name], actual[name]
        pairs = zip(before, after, strict=True) if isinstance(before, list) else [(before, after)]
        assert all(
            x is None or torch.equal(x.nan_to_num(), y.cpu().nan_to_num()) for x, y in pairs
        ), name
    assert torch.equal(actual["numbers"][:9].cpu(), arguments["numbers"][:9])
    entry = RoundEntry.of(actual["ring"][5 % ENTRIES], batch, nodes)
    assert entry.counts == [0] * batch and entry.status == [*[0] * (batch - 2), 1, 0]
    assert entry.num_accepted == arguments["verdict"][batch * nodes :][:batch].tolist()


def test_block_starts_at_the_largest_end_of_all_rows(device):
    """Row 0 is the longest and ends in this round, row 1 goes on, row 2 ended before."""
    state = random_round("many-rows", 0)
    state = mapped(state, lambda x: x)
    batch, nodes = 3, 3
    numbers = torch.tensor(
        [
            [9] * 3,
            [20, 10, 15],
            [0] * 3,
            [20, 10, 15],
            [30] * 3,
            [1] * 3,
            [-1, -1, -2],
            [4] * 3,
            [50] * 3,
            [0] * 3,
        ]
    )
    path = torch.tensor([[0, 1, -1], [0, -1, -1], [-1, -1, -1]])
    arguments = dict(
        state,
        caches=[torch.zeros(3, 1, 40, 1)],
        tokens=torch.full((3, 3), 5),
        verdict=torch.cat([path.flatten(), torch.tensor([1, 0, -1, EOS[0], 9, -1, 0, 0, 0])]),
        numbers=numbers,
        text=state["text"][:3],
        new_tokens=state["new_tokens"][:3],
        ring=torch.zeros(1, RoundEntry.size(batch, nodes)).long(),
    )
    actual = check(arguments, device)
    assert actual["numbers"][1].tolist() == [22, 11, 15]
    assert actual["numbers"][4].tolist() == [22] * 3
    assert actual["numbers"][6].tolist() == [-2, -1, -2]


def test_strided_arguments_and_the_memory_around_them(device):
    """Views of larger buffers, as of the first rows of a state with room for more rows and nodes."""
    plain = random_round("odd", 11)

    def wide(tensor, dims):
        poison = torch.nan if tensor.is_floating_point() else 111
        shape = [2 * size + 1 if dim in dims else size for dim, size in enumerate(tensor.shape)]
        buffer = torch.full(shape, poison).to(tensor.dtype)
        view = buffer[
            tuple(slice(1, None, 2) if dim in dims else slice(None) for dim in range(tensor.ndim))
        ]
        view.copy_(tensor)
        return buffer, view

    dims = {
        "caches": (0, 1, 2), "tokens": (0, 1), "verdict": (), "eos": (0,), "numbers": (0, 1), "text": (0, 1),
        "new_tokens": (0, 1), "ring": (0,), "clock": (), "features": (0, 1),
        "new_features": (0, 1),
    }  # fmt: skip

    def views(device):
        buffers, given = {}, {}
        for name, value in plain.items():
            many = isinstance(value, list)
            made = [wide(each, dims[name]) for each in (value if many else [value])]
            moved = [(buffer.to(device), view) for buffer, view in made]
            buffers[name] = [buffer for buffer, _ in moved]
            taken = [
                buffer.as_strided(view.shape, view.stride(), view.storage_offset())
                for buffer, view in moved
            ]
            given[name] = taken if many else taken[0]
        return buffers, given

    (expected, theirs), (actual, ours) = views("cpu"), views(device)
    round_commit_reference(**theirs)
    ops.round_commit(**ours)
    for name in NAMES:
        for mine, other in zip(actual[name], expected[name], strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("case", ["llama-like", "odd"])
def test_commits_what_verify_match_accepts(case, device):
    batch, nodes, *_ = CASES[case]
    arguments, rng = random_round(case, 13), generator(13)
    parents = (torch.rand(batch, nodes, generator=rng) * torch.arange(nodes)).long()
    parents[:, 0] = -1
    parents[-1, 0] = -2
    tokens = torch.randint(0, 2, (batch, nodes), generator=rng)
    logits = torch.randn(batch, nodes, 2, generator=rng)
    zeros = torch.zeros(batch).long()
    verdict = ops.verify_match(logits, tokens, parents, zeros, zeros, zeros, zeros.bool())
    assert int(verdict.num_accepted.max()) > 0
    arguments.update(tokens=tokens, verdict=verdict.packed)
    arguments["numbers"][6] = torch.where(parents[:, 0] == -1, -1, -2)
    entry = RoundEntry.of(check(arguments, device)["ring"][5 % ENTRIES], batch, nodes)
    assert entry.num_accepted == verdict.num_accepted.tolist()
    assert entry.paths == verdict.path.tolist()


@pytest.mark.parametrize("device", emulation.PARAMS, indirect=True)
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("accepted", 1, 12), ("accepted", 1, -2), ("accepted", 1, 2**62), ("path", 1, -1),
        ("path", 1, 12), ("path", 1, -(2**63)), ("length", 1, -1), ("length", 1, 2**31 - 1),
        ("limit", 1, 2**40), ("limit", 1, 0),
    ],
)  # fmt: skip
def test_kernels_leave_rows_with_illegal_numbers(name, index, value, device):
    """The CPU op raises an error instead. Row 0 is committed."""
    arguments = random_round("llama-like", 3)
    batch, nodes, *_ = CASES["llama-like"]
    verdict = random_verdict(batch, nodes, generator(6), inactive=0)
    verdict[batch * nodes :][:batch] = torch.tensor([1, 1])
    verdict[: batch * nodes] = torch.tensor([[0, 1, *[-1] * (nodes - 2)]] * batch).flatten()
    arguments["verdict"] = verdict
    arguments["numbers"][6] = -1
    legal = check(arguments, "cpu")
    place = {
        "accepted": (verdict, batch * nodes + index),
        "path": (verdict, index * nodes + 1),
        "length": (arguments["numbers"], (7, index)),
        "limit": (arguments["numbers"], (8, index)),
    }[name]
    place[0][place[1]] = value
    actual = to("cpu", arguments)
    ops.round_commit(**actual)
    entry = RoundEntry.of(actual["ring"][5 % ENTRIES], batch, nodes)
    assert entry.status == [0, ops.STATUS_ILLEGAL_NUMBERS]
    assert entry.counts[1] == 0 and entry.counts[0] > 0
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(actual["numbers"][kept, 1], arguments["numbers"][kept, 1])
    assert torch.equal(actual["text"], torch.stack([legal["text"][0], arguments["text"][1]]))
    for mine, before, done in zip(
        actual["caches"], arguments["caches"], legal["caches"], strict=True
    ):
        assert torch.equal(mine[0], done[0]) and torch.equal(mine[1], before[1])


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    arguments = to(device, random_round("llama-like", 0))
    torch.library.opcheck(torch.ops.specdec.round_commit, tuple(arguments.values()))
    arguments.update(features=[], new_features=None, caches=[])
    torch.library.opcheck(torch.ops.specdec.round_commit, tuple(arguments.values()))


def test_inference_tensors_are_accepted():
    with torch.inference_mode():
        arguments = to("cpu", random_round("odd", 1))
    expected = random_round("odd", 1)
    round_commit_reference(**expected)
    with torch.inference_mode():
        ops.round_commit(**arguments)
    assert_same(arguments, expected)


def changed(name, index, value):
    tensor = random_round("llama-like", 2)[name]
    tensor[index] = value
    return {name: tensor}


BATCH, NODES = CASES["llama-like"][:2]
ACCEPTED = BATCH * NODES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(2, 12)}, "argument tokens must be torch.int64, got torch.float32"),
        ({"tokens": torch.zeros(2, 1025).long()}, "argument tokens must have 1 to 1024 nodes"),
        ({"verdict": torch.zeros(9).long()},
            r"argument verdict must be \[batch \* \(nodes \+ 3\)\] = \[30\], got shape \[9\]"),
        ({"verdict": torch.zeros(60).long()[::2]}, "argument verdict must be contiguous"),
        ({"eos": torch.zeros(1, 1).long()}, r"argument eos must be \[ids\], got shape"),
        ({"numbers": torch.zeros(9, 2).long()}, r"argument numbers must be \[10, batch\] = \[10, 2\]"),
        ({"numbers": torch.zeros(10, 1).long().expand(10, 2)},
            "argument numbers must not be an expanded tensor"),
        ({"text": torch.zeros(3, 9).long()}, r"argument text must be \[batch, capacity\] = \[2, 9\]"),
        ({"new_tokens": torch.zeros(2, 11).long()},
            r"argument new_tokens must have at least 12 elements in dimension 1, the nodes of tokens, got"),
        ({"ring": torch.zeros(3, 56).long()},
            r"argument ring must have at least 57 elements in dimension 1, 1 \+ batch \* \(4 "),
        ({"ring": torch.zeros(0, 57).long()}, "argument ring must have at least 1 elements in dimension 0"),
        ({"clock": torch.zeros(3).int()}, r"argument clock must be \[2\]"),
        ({"clock": torch.tensor([-1, 0]).int()}, r"clock\[0\] = -1; expected a number of rounds"),
        ({"new_features": None}, "argument new_features must be given if there are features"),
        ({"new_features": torch.zeros(2, 12, 288)}, r"argument features\[0\] must be torch.float32"),
        ({"new_features": torch.zeros(2, 12, 287).bfloat16()},
            r"argument new_features must be .* the width of all features\] = \[2, 12, 288\], got shape"),
        ({"new_features": torch.zeros(2, 11, 288).bfloat16()},
            "argument new_features must have at least 12 elements in dimension 1"),
        ({"features": [torch.zeros(2, 12, 1).bfloat16()] * 9}, "features must have at most 8 tensors, got 9"),
        ({"features": [torch.zeros(2, 11, 288).bfloat16()]},
            r"argument features\[0\] must be \[batch, nodes, width\] = \[2, 12, 288\], got shape"),
        ({"caches": [torch.zeros(3, 1, 9, 4)]},
            r"argument caches\[0\] must have the batch of the other arguments, 2, got shape"),
        (changed("verdict", ACCEPTED, 12), r"num_accepted\[0\] = 12; expected -1 \(inactive row\) to 11"),
        (changed("verdict", 0, 12), r"path\[0, 0\] = 12; expected a node in \[0, 12\)"),
        (changed("numbers", (7, 0), -1),
            r"text_lengths\[0\] = -1 with the limit \d+; expected 0 <= length < limit <= 72, the columns"),
        (changed("numbers", (8, 0), 73), r"with the limit 73; expected 0 <= length < limit <= 72"),
        (changed("numbers", (8, 0), 0), r"with the limit 0; expected"),
        (changed("numbers", (4, 0), 999), r"block_starts\[0\] = 999 with path\[0, 0\] = 0 is outside"),
        (changed("numbers", (1, 0), -1), r"ends\[0\] = -1 with \d+ slots to move; the smallest cache"),
    ],
)  # fmt: skip
def test_rejects(changes, message):
    arguments = to("cpu", {**random_round("llama-like", 2), **changes})
    if "numbers" in changes and changes["numbers"].stride(1) == 0:
        arguments["numbers"] = changes["numbers"]
    if "verdict" in changes:
        arguments["verdict"] = changes["verdict"]
    before = to("cpu", arguments)
    with pytest.raises(ValueError, match="specdec::round_commit: .*" + message):
        ops.round_commit(**arguments)
    assert_same(arguments, before)
