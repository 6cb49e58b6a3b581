"""``adjust_logits``: the op has the bits of its specification on every device and instruction set.

``python_tests/verify/test_adjustments.py`` compares both with transformers' processors.
"""

import pytest
import torch
from helpers.ops.op_cases import (
    all_parents,
    check_rows_alone,
    generator,
    random_parents,
    sliced,
    strided,
    to,
    two_threads,
)

from specdec_ext import ops
from specdec_ext.ops import Adjustment
from specdec_ext.reference.adjust_logits import adjust_logits as adjust_logits_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = torch.inf, torch.nan
ALWAYS = (0, 2**62)  # columns to which an adjustment applies

CASES = {  # name: (batch, nodes, vocab, columns)
    "one-of-everything": (1, 1, 1, 1),
    "no-text": (3, 4, 7, 0),
    "root-only": (4, 1, 65, 20),
    "small": (6, 9, 5, 12),
    "several-groups": (2, 37, 11, 30),
    "vocab-1023": (2, 5, 1023, 40),
    "vocab-1024": (2, 17, 1024, 40),
    "several-chunks": (1, 6, 2050, 300),
    "long-text": (2, 3, 40, 700),
    "empty-batch": (0, 3, 10, 5),
}


def random_adjustments(vocab, columns, seed):
    """All kinds, some twice, in random order; each applies to a random range of columns or always."""
    rng = generator(seed)
    kinds = torch.tensor([0, 1, 2, 3, 4, 1, 2, 3])
    kinds = kinds[torch.randperm(len(kinds), generator=rng)]
    ranges = torch.randint(columns + 4, (len(kinds), 2), generator=rng).sort(dim=-1).values
    always = torch.rand(len(kinds), 1, generator=rng) < 0.6
    ranges = torch.where(always, torch.tensor(ALWAYS), ranges)
    tables = torch.randn(len(kinds), vocab, generator=rng)
    listed = torch.rand(len(kinds), vocab, generator=rng) < 0.2
    tables[kinds == Adjustment.ADD] *= listed[kinds == Adjustment.ADD]
    tables[(kinds == Adjustment.OVERWRITE)[:, None] & ~listed] = NAN
    tables[(kinds >= Adjustment.PENALISE) | (kinds == Adjustment.OFF)] = NAN  # are not read
    return torch.cat([kinds[:, None], ranges], dim=1), tables


def random_arguments(batch, nodes, vocab, columns, *, dtype=torch.float32, illegal=0.0, seed=0):
    """Few different tokens, so that n-grams repeat; a few are outside the vocabulary."""
    rng = generator(seed)
    logits = (torch.randn(batch, nodes, vocab, generator=rng) * 4).to(dtype)
    logits[torch.rand(logits.shape, generator=rng) < 0.02] = -INF

    def random_tokens(*shape):
        common = torch.randint(vocab, (4,), generator=rng)
        chosen = common[torch.randint(4, shape, generator=rng)]
        rare = torch.randint(-2, vocab + 3, shape, generator=rng)
        return torch.where(torch.rand(shape, generator=rng) < 0.8, chosen, rare)

    parents = random_parents(batch, nodes, seed, illegal=illegal)
    parents[:, 1:] = torch.where(  # half of the links go to the node before, for long paths
        torch.rand(batch, nodes - 1, generator=rng) < 0.5, torch.arange(nodes - 1), parents[:, 1:]
    )
    lengths = torch.randint(columns + 1, (batch,), generator=rng)
    lengths[: batch // 2] = columns
    return (
        logits,
        random_tokens(batch, nodes),
        parents,
        random_tokens(batch, columns),
        lengths,
        torch.randint(-1, columns + 3, (batch,), generator=rng)
        * (torch.rand(batch, generator=rng) < 0.5),
        torch.rand(batch, generator=rng) + 0.5,
        torch.randint(5, (batch,), generator=rng),
        *random_adjustments(vocab, columns, seed),
    )


def one_node(scores, text, kinds, *, skip=0, penalty=1.0, size=0, tables=None):
    """Arguments of a single root, with adjustments that always apply."""
    logits = torch.as_tensor(scores)[None, None]
    text = torch.tensor(text, dtype=torch.long)[None]
    return (
        logits,
        torch.tensor([[-7]]),
        torch.tensor([[-1]]),
        text,
        torch.tensor([text.shape[1]]),
        torch.tensor([skip]),
        torch.tensor([penalty]),
        torch.tensor([size]),
        torch.tensor([(kind, *ALWAYS) for kind in kinds]).view(-1, 3),
        torch.full((len(kinds), logits.shape[-1]), NAN) if tables is None else tables,
    )


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype == torch.float32 and actual.shape == expected.shape
    actual = actual.cpu()
    nan = actual.isnan() & expected.isnan()
    different = (actual.view(torch.int32) != expected.view(torch.int32)) & ~nan
    assert not different.any(), (
        f"{int(different.sum())} scores differ, first {different.nonzero()[0].tolist()}"
    )


@pytest.mark.parametrize("illegal", [0.0, 0.2], ids=["legal", "illegal-links"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, dtype, illegal, device):
    for seed in range(3):
        arguments = random_arguments(*CASES[case], dtype=dtype, illegal=illegal, seed=seed)
        actual = ops.adjust_logits(*to(device, arguments))
        assert_same_bits(actual, adjust_logits_reference(*arguments))


def test_cases_use_every_kind():
    """Without one of the kinds, the random cases have other scores: repeated n-grams occur, too."""
    arguments = random_arguments(*CASES["small"], seed=1)
    expected = adjust_logits_reference(*arguments)
    for kind in Adjustment:
        adjustments = arguments[8].clone()
        adjustments[adjustments[:, 0] == kind, 0] = 0
        without = adjust_logits_reference(*arguments[:8], adjustments, arguments[9])
        assert torch.equal(without.nan_to_num(), expected.nan_to_num()) == (kind == Adjustment.OFF)


def test_every_small_tree(device):
    """All trees of 4 nodes with all tokens of a vocabulary of 2, root aside: 2-grams and penalties."""
    parents = all_parents(4)
    tokens = torch.cartesian_prod(*[torch.tensor([0, 1])] * 3)
    parents, tokens = parents.repeat(len(tokens), 1), tokens.repeat_interleave(len(parents), 0)
    tokens = torch.cat([torch.full((len(tokens), 1), 9), tokens], dim=1)
    batch = len(tokens)
    arguments = (
        torch.randn(batch, 4, 2, generator=generator(0)),
        tokens,
        parents,
        torch.tensor([[0, 1, 0]]).expand(batch, 3),
        torch.arange(batch) % 4,
        torch.arange(batch) % 3,
        torch.full((batch,), 1.5),
        torch.full((batch,), 2),
        torch.tensor([(Adjustment.PENALISE, *ALWAYS), (Adjustment.BAN, *ALWAYS)]),
        torch.full((2, 2), NAN),
    )
    actual = ops.adjust_logits(*to(device, arguments))
    assert_same_bits(actual, adjust_logits_reference(*arguments))


def test_worked_example(device):
    """The text 5 6 7 5 6 with the nodes 7 and, below it, 3."""
    arguments = (
        torch.ones(1, 3, 8),
        torch.tensor([[9, 7, 3]]),
        torch.tensor([[-1, 0, 1]]),
        torch.tensor([[5, 6, 7, 5, 6, 1, 1]]),
        torch.tensor([5]),
        torch.tensor([2]),
        torch.tensor([2.0]),
        torch.tensor([3]),
        torch.tensor([(Adjustment.PENALISE, 6, 8), (Adjustment.BAN, 0, 7)]),
        torch.full((2, 8), NAN),
    )
    scores = ops.adjust_logits(*to(device, arguments)).tolist()[0]
    assert scores == [
        [1, 1, 1, 1, 1, 1, 1, -INF],  # five columns: not penalised yet; 5 6 7 is in the text
        [1, 1, 1, 1, 1, -INF, 0.5, 0.5],  # six: 5, 6 and 7 are penalised; 6 7 5 is in the text
        [1, 1, 1, 0.5, 1, 0.5, 0.5, 0.5],  # seven: bans are over
    ]


def test_adjustments_apply_in_order(device):
    """-1 + 3 = 2, halved to 1 because it is positive by then; in the other order -1 * 2 + 3 = 1 as well, so
    the second token tells: 1 + 3 = 4 / 2 = 2 or 1 / 2 + 3 = 3.5."""
    tables = torch.full((2, 2), 3.0)
    kinds = [Adjustment.ADD, Adjustment.PENALISE]
    for order, expected in ((kinds, [1.0, 2.0]), (kinds[::-1], [1.0, 3.5])):
        arguments = one_node([-1.0, 1.0], [0, 1], order, penalty=2.0, tables=tables)
        assert ops.adjust_logits(*to(device, arguments)).flatten().tolist() == expected


def test_unusual_scores(device):
    """NaN and infinities follow IEEE; -0 + 0 is 0, but a penalty keeps -0; overwriting removes NaN."""
    scores = [NAN, INF, -INF, -0.0, 0.0, -1e-45, 3e38]
    text = list(range(7))
    tables = torch.tensor([0.0, -INF, 1.0, 0.0, -0.0, 0.0, 3e38])[None]
    for kind in (Adjustment.ADD, Adjustment.OVERWRITE, Adjustment.PENALISE):
        arguments = one_node(scores, text, [kind], penalty=0.5, tables=tables)
        actual = ops.adjust_logits(*to(device, arguments))
        assert_same_bits(actual, adjust_logits_reference(*arguments))
    assert str(actual.flatten().tolist()) == "[nan, inf, -inf, -0.0, 0.0, -0.0, inf]"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bans_of_long_and_repeating_texts(size, device):
    """A text of one token only, and one with a period; 1-grams ban all tokens of the text."""
    for text in ([3] * 40, [0, 1, 2, 3, 4] * 30, [0]):
        arguments = one_node(torch.zeros(7), text, [Adjustment.BAN], size=size)
        actual = ops.adjust_logits(*to(device, arguments))
        assert_same_bits(actual, adjust_logits_reference(*arguments))
        assert (actual == -INF).sum() == (len(set(text)) if size == 1 else len(text) >= size)


def test_n_grams_of_tokens_outside_the_vocabulary(device):
    """They are compared as 64-bit integers, and are neither penalised nor banned."""
    big = 2**40
    kinds = [Adjustment.BAN, Adjustment.PENALISE]
    for text, banned in (
        ([big, 1, big], [1]),
        ([0, 1, big], []),
        ([1, big, 1], []),
        ([-1, 2, -1], [2]),
    ):
        arguments = one_node(torch.zeros(4), text, kinds, size=2, penalty=2.0)
        scores = ops.adjust_logits(*to(device, arguments)).flatten()
        assert (scores == -INF).nonzero().flatten().tolist() == banned


def test_a_chain_of_most_nodes(device, emulated):
    nodes = 40 if emulated else ops.MAX_NODES
    arguments = list(random_arguments(1, nodes, 7, 5, seed=3))
    arguments[2] = torch.arange(-1, nodes - 1)[None]
    arguments[7] = torch.tensor([9])
    actual = ops.adjust_logits(*to(device, arguments))
    assert_same_bits(actual, adjust_logits_reference(*arguments))


def test_unused_memory_is_not_read(device):
    """The text beyond its length, and everything of an inactive row, may hold anything."""
    arguments = list(random_arguments(3, 5, 9, 20, seed=4))
    arguments[2][1] = -2
    arguments[4] = torch.tensor([7, 20, 13])
    expected = adjust_logits_reference(*arguments)
    for row, length in ((0, 7), (2, 13)):
        arguments[3][row, length:] = torch.randint(9, (20 - length,), generator=generator(1))
    arguments[3][1] = -(2**63)
    arguments[4][1], arguments[5][1], arguments[6][1], arguments[7][1] = 2**62, -(2**62), NAN, -5
    arguments[1][1] = 2**62
    assert_same_bits(ops.adjust_logits(*to(device, arguments)), expected)
    assert torch.equal(expected[1], arguments[0][1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs_equal_reference(dtype, device):
    """Logits sliced out of a NaN-filled buffer at an odd offset; everything else is strided."""
    arguments = random_arguments(5, 6, 101, 20, dtype=dtype, seed=3)
    expected = adjust_logits_reference(*arguments)
    between = [0, 3, -1, 4, 1000, 999, -1.0, 7, 2]
    others = [strided(t, device, b) for t, b in zip(arguments[1:9], between[1:], strict=True)]
    wide = torch.full((len(arguments[9]), 205), NAN, device=device)
    wide[:, 7:108] = arguments[9]
    actual = ops.adjust_logits(sliced(arguments[0], device), *others, wide[:, 7:108])
    assert_same_bits(actual, expected)


def test_a_row_does_not_depend_on_the_others(device):
    *rows, adjustments, tables = to(device, random_arguments(3, 7, 31, 25, seed=9))

    def op(*given):
        return (ops.adjust_logits(*given, adjustments, tables).nan_to_num(),)

    check_rows_alone(op, tuple(rows), ["scores"])


def test_threads_do_not_change_the_result():
    arguments = random_arguments(3, 9, 20_001, 500, seed=2)
    expected = ops.adjust_logits(*arguments)
    with two_threads():
        for _ in range(10):
            assert_same_bits(ops.adjust_logits(*arguments), expected)


def isa_results():
    cases = (random_arguments(3, 7, 1003, 60, dtype=dtype, seed=1) for dtype in DTYPES)
    return [ops.adjust_logits(*arguments) for arguments in cases]


def test_without_adjustments_the_scores_are_the_logits(device):
    arguments = random_arguments(2, 3, 9, 5)
    actual = ops.adjust_logits(*to(device, [*arguments[:8], arguments[8][:0], arguments[9][:0]]))
    assert torch.equal(actual.cpu(), arguments[0])


def test_most_adjustments(device):
    count = ops.MAX_ADJUSTMENTS
    tables = 2.0 ** torch.arange(count)[:, None].expand(count, 3)
    arguments = one_node(torch.zeros(3), [], [Adjustment.ADD] * count, tables=tables)
    actual = ops.adjust_logits(*to(device, arguments))
    assert_same_bits(actual, adjust_logits_reference(*arguments))


def test_values_outside_their_range_are_ignored_by_kernels(device, kernel):
    """The CPU op raises an error; a kernel clamps lengths, and ignores unknown kinds and negative n."""
    if not kernel:
        pytest.skip("test_rejects has the CPU's errors")
    arguments = list(random_arguments(3, 4, 9, 6, seed=2))
    adjustments = arguments[8].clone()
    arguments[4], arguments[7] = torch.tensor([0, 6, 6]), torch.tensor([0, 2, 0])
    arguments[8] = torch.cat([adjustments, torch.tensor([(0, *ALWAYS)] * 2)])
    arguments[9] = torch.cat([arguments[9], torch.zeros(2, 9)])
    expected = adjust_logits_reference(*arguments)
    arguments[4], arguments[7] = torch.tensor([-4, 2**62, 7]), torch.tensor([-1, 2, -(2**62)])
    arguments[8][-2:, 0] = torch.tensor([5, -(2**63)])
    assert_same_bits(ops.adjust_logits(*to(device, arguments)), expected)


@pytest.mark.parametrize("shape", [(2, 3, 9, 5), (0, 2, 9, 4), (1, 1, 1, 0)])
def test_opcheck(shape):
    arguments = random_arguments(*shape, dtype=torch.bfloat16)  # the scores are of float32
    torch.library.opcheck(torch.ops.specdec.adjust_logits, arguments)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t.double(), r"argument logits must be torch.float32, .* got torch.float64"),
        (0, lambda t: t[0], r"argument logits must be \[batch, nodes, vocab\], got shape \[3, 6\]"),
        (0, lambda t: t[..., ::2], r"argument logits must be contiguous in its last .* stride 2"),
        (0, lambda t: t[:, :0], r"argument logits must have 1 to 1024 nodes per row"),
        (1, lambda t: t.int(), r"argument tokens must be torch.int64, got torch.int32; convert"),
        (
            2,
            lambda t: t[:, :2],
            r"argument parents must be \[batch, nodes\] = \[2, 3\], got .*2, 2",
        ),
        (3, lambda t: t[0], r"argument text must be \[batch, columns\], got shape \[5\]"),
        (3, lambda t: t[:1], r"argument text must be \[batch, columns\] = \[2, 5\], got .*1, 5"),
        (4, lambda t: t[:1], r"argument lengths must be \[batch\] = \[2\], got shape \[1\]"),
        (5, lambda t: t.int(), r"argument skips must be torch.int64, got torch.int32"),
        (6, lambda t: t.double(), r"argument penalties must be torch.float32, got torch.float64"),
        (7, lambda t: t[None], r"argument ngram_sizes must be \[batch\] = \[2\], got .*1, 2"),
        (
            8,
            lambda t: t[:, :2],
            r"argument adjustments must be \[count, 3\] = \[8, 3\], got .*8, 2",
        ),
        (8, lambda t: t[0], r"argument adjustments must be \[count, 3\], got shape \[3\]"),
        (8, lambda t: t.repeat(5, 1), r"argument adjustments must have at most 32 rows, got 40; "),
        (9, lambda t: t[1:], r"argument tables must be \[count, vocab\] = \[8, 6\], got .*7, 6"),
        (9, lambda t: t[:, ::2].repeat(1, 2).T.contiguous().T, r"argument tables must be contig"),
        (4, lambda t: t + 6, r"lengths\[0\] = 11; expected a number of columns of text, 0 to 5"),
        (4, lambda t: t - 9, r"lengths\[0\] = -4; expected a number of columns"),
        (6, lambda t: t * 0, r"penalties\[0\] = 0.0+; expected a positive number, 1 is off"),
        (6, lambda t: t * NAN, r"penalties\[0\] = nan; expected a positive number"),
        (7, lambda t: t * 0 - 1, r"ngram_sizes\[0\] = -1; expected 0 \(off\) or more"),
        (8, lambda t: t + 5, r"adjustments\[0\] = kind \d; expected a kind of 0 to 4"),
    ],
)
def test_rejects(index, change, message):
    arguments = list(random_arguments(2, 3, 6, 5))
    arguments[4][0] = 5
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match="specdec::adjust_logits: " + message):
        ops.adjust_logits(*arguments)
