"""``verify_match``: the op equals its specification bit for bit, on every device and instruction set.

``test_distribution.py`` tests the distribution of what it emits.
"""

import pytest
import torch
from helpers.ops.op_cases import (
    DEVICES,
    all_parents,
    assert_same,
    check_rows_alone,
    generator,
    random_parents,
    sliced,
    strided,
    to,
    two_threads,
)

from specdec_ext import ops
from specdec_ext.reference.rng import gumbel_noise
from specdec_ext.reference.verify_match import verify_match as verify_match_reference

NAMES = list(ops.HostMatchResult._fields)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

CASES = {  # name: (batch, nodes, vocab)
    "one-of-everything": (1, 1, 1),
    "root-only": (4, 1, 1000),
    "vocab-2": (50, 9, 2),
    "vocab-63": (7, 12, 63),
    "vocab-64": (7, 12, 64),
    "vocab-65": (7, 12, 65),
    "vocab-2047": (2, 9, 2047),
    "vocab-2048": (2, 9, 2048),
    "vocab-2049": (2, 9, 2049),
    "several-chunks": (2, 5, 8192 * 2 + 3),
    "several-groups": (3, 70, 33),
    "many-rows": (130, 4, 9),
    "max-nodes": (1, ops.MAX_NODES, 3),
    "empty-batch": (0, 3, 10),
}


def likely_tokens(logits, parents, share, seed):
    """Tokens, a `share` of them among the parent's best three, so that long paths are accepted."""
    batch, nodes, vocab = logits.shape
    best = logits.float().topk(min(3, vocab), dim=-1).indices
    parent = parents.clamp(0, nodes - 1)
    rank = torch.randint(best.shape[-1], (batch, nodes), generator=generator(seed))
    rows = torch.arange(batch)[:, None]
    random = torch.randint(vocab, (batch, nodes), generator=generator(seed + 1))
    take = torch.rand(batch, nodes, generator=generator(seed + 2)) < share
    return torch.where(take, best[rows, parent, rank], random)


def random_arguments(batch, nodes, vocab, *, dtype=torch.float32, illegal=0.0, seed=0):
    rng = generator(seed)
    logits = (torch.randn(batch, nodes, vocab, generator=rng) * 4).to(dtype)
    parents = random_parents(batch, nodes, seed, illegal=illegal)
    tokens = likely_tokens(logits, parents, 0.9, seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=rng)
    root_positions = torch.randint(2**33, (batch,), generator=rng)
    stochastic = torch.rand(batch, generator=rng) < 0.5
    return logits, tokens, parents, root_positions, seeds, torch.arange(batch), stochastic


def chain(logits, tokens, stochastic=False, **changes):
    """Arguments of one row: a chain of `tokens` (root included) with logits per node."""
    logits = torch.as_tensor(logits, dtype=torch.float32)[None]
    nodes = logits.shape[1]
    arguments = {
        "logits": logits,
        "tokens": torch.tensor([tokens]),
        "parents": torch.arange(-1, nodes - 1)[None],
        "root_positions": torch.tensor([4]),
        "seeds": torch.tensor([1]),
        "row_ids": torch.tensor([0]),
        "stochastic": torch.tensor([stochastic]),
    }
    return {**arguments, **changes}


@pytest.mark.parametrize("illegal", [0.0, 0.2], ids=["legal", "illegal-links"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, dtype, illegal, device):
    arguments = random_arguments(*CASES[case], dtype=dtype, illegal=illegal, seed=len(case))
    actual = ops.verify_match(*to(device, arguments))
    assert_same(actual, verify_match_reference(*arguments), NAMES)


def test_cases_reach_deep_into_trees():
    """The random cases accept drafts of several lengths."""
    result = ops.verify_match(*random_arguments(50, 40, 10, seed=5))
    assert set(result.num_accepted.tolist()) >= {0, 1, 2, 3}


@pytest.mark.parametrize("stochastic", [False, True])
def test_every_small_tree(stochastic, device):
    """All trees of 4 nodes x all tokens in a vocabulary of 2, root token aside."""
    parents = all_parents(4)
    tokens = torch.cartesian_prod(*[torch.tensor([0, 1])] * 3)
    parents, tokens = parents.repeat(len(tokens), 1), tokens.repeat_interleave(len(parents), 0)
    tokens = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.long), tokens], dim=1)
    batch = len(tokens)
    arguments = (
        torch.randn(batch, 4, 2, generator=generator(0)),
        tokens,
        parents,
        torch.arange(batch),
        torch.full((batch,), 9),
        torch.arange(batch) % 7,
        torch.full((batch,), stochastic),
    )
    actual = ops.verify_match(*to(device, arguments))
    assert_same(actual, verify_match_reference(*arguments), NAMES)


def test_worked_example(device):
    """The root 7 has the children 3 and 5, and 5 has the child 1: 5 and 1 are accepted, and 2 is emitted."""
    picks = [5, 0, 1, 2]  # the arg-max at each node
    logits = torch.nn.functional.one_hot(torch.tensor(picks), 8).float()[None]
    links = torch.tensor([[7, 3, 5, 1]]), torch.tensor([[-1, 0, 0, 2]])
    zero = torch.zeros(1, dtype=torch.long)
    arguments = (logits, *links, zero, zero, zero, torch.tensor([False]))
    result = ops.verify_match(*to(device, arguments))
    assert result.path.tolist() == [[0, 2, 3, -1]]
    assert result.num_accepted.tolist() == [2]
    assert result.next_token.tolist() == [2]
    assert result.status.tolist() == [0]


def test_worked_example_with_noise():
    """With equal logits the pick is the arg-max of the noise of the position after the root."""
    noise = gumbel_noise(torch.tensor(1), torch.tensor(0), torch.tensor(5), 4)
    result = ops.verify_match(**chain([[0.0] * 4], [9], stochastic=True))
    assert result.next_token.tolist() == [int(noise.argmax())]
    assert noise.tolist() == pytest.approx([1.3222663, -0.456811, -0.0891121, -0.0821371], abs=1e-6)


def test_first_of_duplicate_siblings_is_accepted(device):
    arguments = chain([[0, 1], [1, 0], [0, 1], [0, 1]], [0, 1, 1, 0])
    arguments["parents"] = torch.tensor([[-1, 0, 0, 1]])
    result = ops.verify_match(*to(device, arguments.values()))
    assert result.path.tolist() == [[0, 1, 3, -1]]


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([1.0, 2.0, 2.0], 1),
        ([-0.0, 0.0, -0.0], 0),  # the two zeros are a tie
        ([0.0, -0.0], 0),
        ([-torch.inf, -5.0, -5.0], 1),
        ([3.0, torch.inf, torch.inf], 1),
        ([-3.4e38, -torch.inf], 0),
        ([0.0] * 70 + [1.0] * 70, 70),
        ([0.0] * 20000 + [1.0] + [0.0] * 20000 + [1.0], 20000),
    ],
    ids=["tie", "zeros", "zeros-2", "inf", "inf-tie", "lowest", "blocks", "chunks"],
)
def test_ties_go_to_the_lowest_token(logits, token, device):
    result = ops.verify_match(*to(device, chain([logits], [0]).values()))
    assert result.next_token.tolist() == [token]


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_single_possible_token_is_certain(stochastic, device):
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 123] = -50
    result = ops.verify_match(*to(device, chain(logits, [0], stochastic).values()))
    assert result.next_token.tolist() == [123] and result.status.tolist() == [0]


def test_a_likely_first_token_does_not_hide_rare_ones(device, emulated):
    """The CPU op skips noise where it can't win. Here thousands of unlikely tokens win half the time by
    noise of about 10, although the first block has a high score."""
    batch, vocab = 8 if emulated else 60, 20_000
    logits = torch.zeros(1, 1, vocab)
    logits[..., 0] = torch.tensor(float(vocab)).log()
    zeros = torch.zeros(batch, dtype=torch.long)
    arguments = (
        logits.expand(batch, 1, vocab),
        zeros[:, None],
        zeros[:, None] - 1,
        zeros,
        zeros,
        torch.arange(batch),
        torch.ones(batch, dtype=torch.bool),
    )
    result = ops.verify_match(*to(device, arguments))
    assert_same(result, verify_match_reference(*arguments), NAMES)
    assert batch / 4 < (result.next_token == 0).sum() < batch * 3 / 4


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_or_nothing_finite_at_a_visited_node(dtype, stochastic, device):
    finite = torch.full((70,), -torch.inf)
    finite[1] = 0  # the only possible token: the child is accepted
    for status, value in ((1, torch.nan), (2, -torch.inf)):
        bad = torch.full((70,), value)
        logits = torch.stack([finite, bad, finite])
        arguments = chain(logits, [0, 1, 1], stochastic)
        arguments["logits"] = arguments["logits"].to(dtype)
        result = ops.verify_match(*to(device, arguments.values()))
        assert result.status.tolist() == [status]
        assert result.next_token.tolist() == [-1] and result.num_accepted.tolist() == [0]
        assert result.path.tolist() == [[0, -1, -1]]
        arguments["logits"] = arguments["logits"][:, [1, 0, 0]]
        at_root = ops.verify_match(*to(device, arguments.values()))
        assert at_root.num_accepted.tolist() == [-1] and at_root.path.tolist() == [[-1] * 3]
        assert at_root.status.tolist() == [status]


@pytest.mark.parametrize("place", [0, 63, 64, 8191, 8192, 9000])
def test_a_single_nan_is_found_wherever_it_is(place, device):
    for sign in (1, -1):
        logits = torch.randn(1, 9001, generator=generator(1))
        logits[0, place] = torch.tensor(torch.nan).copysign(torch.tensor(float(sign)))
        result = ops.verify_match(*to(device, chain(logits, [0], stochastic=True).values()))
        assert result.status.tolist() == [1] and result.next_token.tolist() == [-1]


def test_unvisited_nodes_may_hold_nan(device):
    arguments = random_arguments(40, 20, 30, illegal=0.1, seed=8)
    expected = verify_match_reference(*arguments)
    logits = torch.full_like(arguments[0], torch.nan)
    for row, path in enumerate(expected[0]):
        visited = path[path >= 0]
        logits[row, visited] = arguments[0][row, visited]
    actual = ops.verify_match(*to(device, (logits, *arguments[1:])))
    assert_same(actual, expected, NAMES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs_equal_reference(dtype, device):
    """All arguments are strided, the logits between NaN."""
    arguments = random_arguments(5, 6, 101, dtype=dtype, seed=3)
    others = [strided(argument, device, 1) for argument in arguments[1:]]
    actual = ops.verify_match(sliced(arguments[0], device), *others)
    assert_same(actual, verify_match_reference(*arguments), NAMES)


@pytest.mark.parametrize("shape", [(100, 33, 5), (2, 130, 6145)], ids=["many-rows", "many-chunks"])
def test_many_nodes_equal_reference(shape, device):
    """The CUDA kernel has enough blocks for its largest groups of nodes, the last one with one node, and more
    chunks of the vocabulary than threads per node that reduce their picks."""
    arguments = random_arguments(*shape, seed=13)
    assert_same(ops.verify_match(*to(device, arguments)), verify_match_reference(*arguments), NAMES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_logits_may_begin_at_any_address(dtype, device):
    """CUDA loads 16 bytes at a time: rows begin at every remainder, and the vocabulary has any length."""
    nodes, vocab = 17, 2100
    for offset in range(16 // dtype.itemsize):
        arguments = random_arguments(1, nodes, vocab + offset, dtype=dtype, seed=offset)
        width = vocab + 16 + (offset if offset % 3 else 1)
        buffer = torch.full((nodes * width + offset,), torch.nan, dtype=dtype)
        rows = buffer[offset:].view(1, nodes, width)[..., : vocab + offset]
        rows.copy_(arguments[0])
        actual = ops.verify_match(rows.to(device), *to(device, arguments[1:]))
        assert_same(actual, verify_match_reference(*arguments), NAMES)


def test_order_of_nodes_does_not_matter(device):
    """In depth-first order, in a chain and in a star, nodes of one depth have the same noise."""
    nodes = 45
    depth_first = torch.tensor([-1, *(i - 1 if i % 5 else 0 for i in range(1, nodes))])
    parents = torch.stack(
        [depth_first, torch.arange(-1, nodes - 1), -(torch.arange(nodes) == 0).long()]
    )
    _, _, _, positions, seeds, row_ids, _ = random_arguments(3, 1, 1, seed=11)
    for vocab in (3, 5):
        logits = torch.randn(3, nodes, vocab, generator=generator(vocab))
        tokens = torch.zeros(3, nodes, dtype=torch.long)
        logits[..., 0] += 9
        arguments = (logits, tokens, parents, positions, seeds, row_ids, torch.ones(3).bool())
        actual = ops.verify_match(*to(device, arguments))
        assert_same(actual, verify_match_reference(*arguments), NAMES)
        assert actual.num_accepted[1] > 8


def test_counters_are_left_at_zero_for_the_next_call(device):
    arguments = to(device, random_arguments(6, 40, 2500, illegal=0.1, seed=12))
    counters = torch.zeros(9, dtype=torch.int32, device=arguments[0].device)
    expected = ops.verify_match(*arguments)
    for _ in range(3):
        assert_same(ops.verify_match(*arguments, counters), expected, NAMES)
        assert not counters.any()


def test_one_token_tree_is_plain_decoding(device, emulated):
    """For one seed the text is the same for every tree, and the same as without one."""
    vocab, length, rows = (5, 8, 4) if emulated else (5, 24, 8)
    table = torch.randn(vocab, vocab, generator=generator(6))  # logits depend on the last token
    seeds, row_ids = torch.full((rows,), 42), torch.arange(rows)
    stochastic = torch.tensor([True, False] * (rows // 2))

    def generate(nodes):
        texts = [[1] for _ in range(rows)]
        turn = 0
        while any(len(text) <= length for text in texts):
            turn += 1
            parents = random_parents(rows, nodes, seed=turn)
            tokens = torch.randint(vocab, (rows, nodes), generator=generator(turn))
            tokens[:, 0] = torch.tensor([text[-1] for text in texts])
            positions = torch.tensor([len(text) - 1 for text in texts])
            arguments = (table[tokens], tokens, parents, positions, seeds, row_ids, stochastic)
            result = ops.verify_match(*to(device, arguments))
            for row, text in enumerate(texts):
                path = result.path[row, 1 : result.num_accepted[row] + 1].cpu()
                text += [*tokens[row, path].tolist(), int(result.next_token[row])]
        return [text[:length] for text in texts]

    plain = generate(1)
    assert plain[0] != plain[2]  # rows have noise of their own
    assert plain[1] == plain[3]  # greedy rows do not
    for nodes in (2, 7, 30):
        assert generate(nodes) == plain


def test_a_row_does_not_depend_on_the_others():
    check_rows_alone(ops.verify_match, random_arguments(11, 6, 77, seed=9), NAMES)


def test_threads_do_not_change_the_result():
    arguments = random_arguments(3, 6, 70_001, seed=2)
    expected = ops.verify_match(*arguments)
    with two_threads():
        for _ in range(20):
            assert_same(ops.verify_match(*arguments), expected, NAMES)


def isa_results():
    cases = (random_arguments(6, 9, 5003, dtype=dtype, seed=1) for dtype in DTYPES)
    return [tuple(ops.verify_match(*arguments)) for arguments in cases]


@pytest.mark.parametrize("device", DEVICES)  # emulated kernels have the CPU op's conversion
def test_arg_max_of_neighbouring_16_bit_values_is_the_larger_one(device):
    """For every finite half and bfloat16, subnormals included."""
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        values = values[values.isfinite()]
        values = values[values.float().argsort()]
        values = values[torch.cat([torch.tensor([True]), values[1:] != values[:-1]])]
        pairs = torch.stack([values[:-1], values[1:]], dim=-1)[:, None]
        batch = len(pairs)
        zeros = torch.zeros(batch, dtype=torch.long)
        arguments = (pairs, zeros[:, None], zeros[:, None] - 1, zeros, zeros, zeros, zeros.bool())
        assert (ops.verify_match(*to(device, arguments)).next_token == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 5, 70), (0, 3, 9), (1, 1, 1)])
def test_opcheck(shape, device):
    arguments = to(device, random_arguments(*shape))
    torch.library.opcheck(torch.ops.specdec.verify_match, arguments)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logits", lambda t: t.double(), r"must be torch.float32, .* got torch.float64; convert"),
        ("logits", lambda t: t[0], r"must be \[batch, nodes, vocab\], got shape \[2, 6\]"),
        ("logits", lambda t: t[..., :0], r"must have a vocabulary of 1 to .* shape \[1, 2, 0\]"),
        ("logits", lambda t: t[..., ::2], r"must be contiguous in its last .*, got stride 2; call"),
        ("logits", lambda t: t[:, :0], r"must have 1 to 1024 nodes .* got 0"),
        ("tokens", lambda t: t[:, :1], r"must be \[batch, nodes\] = \[1, 2\], got shape \[1, 1\]"),
        ("tokens", lambda t: t.int(), r"must be torch.int64, got torch.int32; convert"),
        ("parents", lambda t: t[0], r"must be \[batch, nodes\] = \[1, 2\], got shape \[2\]"),
        ("root_positions", lambda t: t[:, None], r"must be \[batch\] = \[1\], got shape \[1, 1\]"),
        ("seeds", lambda t: t.expand(2), r"must be \[batch\] = \[1\], got shape \[2\]"),
        ("row_ids", lambda t: t.double(), r"must be torch.int64, got torch.float64"),
        ("stochastic", lambda t: t.long(), r"must be torch.bool, got torch.int64"),
        ("counters", lambda t: t.long(), r"must be torch.int32, got torch.int64; convert"),
        ("counters", lambda t: t[:0], r"must be contiguous with at least batch = 1 .* shape \[0\]"),
        ("counters", lambda t: t[None], r"must be \[batch\] or longer, got shape \[1, 1\]"),
    ],
)
def test_rejects(name, change, message):
    arguments = chain(torch.zeros(2, 6), [0, 1], counters=torch.zeros(1, dtype=torch.int32))
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"specdec::verify_match: argument {name} {message}"):
        ops.verify_match(**arguments)
