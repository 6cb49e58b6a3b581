"""``ngram_draft``: the op equals its specification and the index of the host on every device."""

import pytest
import torch
from helpers.ops.op_cases import assert_same, check_rows_alone, generator, strided, to
from specdec_ext._host import NgramIndex

from specdec_ext import ops
from specdec_ext.reference.ngram_draft import ngram_draft as reference

NAMES = list(ops.NgramDraft._fields)
UNUSED = -(2**40)  # around the text; it must not be read

CASES = {  # name: (batch, capacity, nodes, min_ngram, max_ngram, num_branches)
    "one-token": (2, 1, 4, 1, 1, 1),
    "two-tokens": (4, 2, 4, 1, 3, 2),
    "root-only": (3, 40, 1, 1, 4, 3),
    "one-node": (3, 40, 2, 1, 4, 3),
    "default-chain": (3, 200, 11, 2, 6, 1),
    "tree": (3, 200, 12, 1, 4, 4),
    "more-branches-than-nodes": (3, 90, 9, 1, 3, 50),
    "warp-of-nodes": (2, 60, 33, 1, 3, 3),
    "most-nodes": (1, 70, ops.MAX_NODES, 1, 2, 3),
    "longest-ngrams": (2, 300, 20, 1, 64, 5),
    "only-longest-ngrams": (2, 300, 20, 64, 64, 5),
    "tile-256": (3, 256, 10, 1, 3, 5),
    "tile-257": (3, 257, 10, 1, 3, 5),
    "three-warps": (2, 700, 10, 2, 5, 8),
    "many-rows": (40, 12, 6, 1, 3, 2),
    "no-capacity": (2, 0, 3, 1, 2, 1),
    "empty-batch": (0, 10, 4, 1, 2, 1),
}


def random_texts(batch, capacity, *, words=3, seed=0):
    """Texts of few words, which repeat n-grams, at the beginning of their rows; the first row is full."""
    rng = generator(seed)
    tokens = torch.randint(words, (batch, capacity), generator=rng) + 2**33
    lengths = torch.randint(1, max(capacity, 1) + 1, (batch,), generator=rng)
    lengths[:1] = capacity
    order = torch.arange(capacity)
    return torch.where(order < lengths[:, None], tokens, UNUSED), lengths


@pytest.mark.parametrize("words", [1, 2, 12])
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, words, device):
    batch, capacity, *rule = CASES[case]
    arguments = random_texts(batch, capacity, words=words, seed=len(case))
    actual = ops.ngram_draft(*to(device, arguments), *rule)
    assert_same(actual, reference(*arguments, *rule), NAMES)


@pytest.mark.parametrize("num_branches", [1, 3])
def test_paddings_before_the_text_are_left_out(num_branches, device):
    """The text is the same at every place. Its beginning, repeated before it, would be a better match."""
    text = [1, 2, 7, 1, 2, 8, 4, 1, 2]
    tokens = torch.tensor([[4, 1, 2, 9, *text], [*text, 9, 4, 1, 2], [4, 1, *text, 4, 1]])
    places = torch.tensor([13, 9, 11]), torch.tensor([4, 0, 2])
    rule = 8, 1, 4, num_branches
    draft = ops.ngram_draft(*to(device, (tokens, places[0])), *rule, *to(device, places[1:]))
    assert_same(draft, reference(tokens, places[0], *rule, places[1]), NAMES)
    alone = reference(torch.tensor([text]), torch.tensor([9]), *rule)
    assert_same(draft, (part.repeat(3, *[1] * (part.ndim - 1)) for part in alone), NAMES)


@pytest.mark.parametrize("first", [-1, 20, 21, 2**40, -(2**63)])
def test_rows_of_paddings_are_inactive(first, device):
    tokens, _ = random_texts(3, 30)
    places = torch.tensor([20, 20, 20]), torch.tensor([0, first, 19])
    draft = ops.ngram_draft(*to(device, (tokens, places[0])), 5, 1, 3, 2, *to(device, places[1:]))
    assert_same(draft, reference(tokens, places[0], 5, 1, 3, 2, places[1]), NAMES)
    assert draft.parents[:, 0].tolist() == [-1, -2, -1]


def test_worked_example(device):
    """The example of ngram_draft.h, with a token behind the text that would be a better match."""
    arguments = torch.tensor([[5, 6, 7, 8, 5, 6, 9, 5, 5]]), torch.tensor([8])
    draft = ops.ngram_draft(*to(device, arguments), 6, 1, 2, 2)
    assert draft.tokens.tolist() == [[5, 6, 9, 5, 7, 6]]
    assert draft.parents.tolist() == [[-1, 0, 1, 2, 1, 3]]
    assert draft.match_lengths.tolist() == [1]


def test_only_the_best_occurrences_are_considered(device):
    """The first occurrence of token 9 has another continuation; it is the 64th or 65th latest one. Its
    competitors are in all warps of the block."""
    for between, num_branches in ((2, 1), (2, 2), (11, 4)):
        for boring, others in ((63, 2), (64, 1)):
            text = [9, 5, *[9, *[1] * (between - 1)] * boring, 9]
            arguments = torch.tensor([text]), torch.tensor([len(text)])
            draft = ops.ngram_draft(*to(device, arguments), 7, 1, 1, num_branches)
            assert_same(draft, reference(*arguments, 7, 1, 1, num_branches), NAMES)
            branches = draft.parents[0].tolist().count(0)
            assert branches == min(others, num_branches)


@pytest.mark.parametrize("index", [21, 22, 41])
def test_lists_of_better_occurrences_further_back_are_merged(index, device):
    """The second warp finds 42 matches of two tokens, the first 42 of one token, of which 22 are considered.

    One of these, counted from the end, has another continuation.
    """
    shorter = [[9, 1, 1, 1, 1, 1] for _ in range(42)]
    shorter[41 - index][1] = 5
    text = [*[8, 9, 1, 1, 1, 1] * 42, *(token for each in shorter for token in each), 8, 9]
    arguments = torch.tensor([text]), torch.tensor([len(text)])
    draft = ops.ngram_draft(*to(device, arguments), 7, 1, 2, 4)
    assert_same(draft, reference(*arguments, 7, 1, 2, 4), NAMES)
    assert draft.parents[0].tolist().count(0) == (2 if index < 22 else 1)


def test_a_long_match_far_from_the_end_wins(device):
    """Behind it are more short matches than are kept, in every warp."""
    text = [3, 1, 2, 7, 8, *[2, 4] * 400, 3, 1, 2]
    arguments = torch.tensor([text]), torch.tensor([len(text)])
    for num_branches in (1, 5):
        draft = ops.ngram_draft(*to(device, arguments), 5, 1, 5, num_branches)
        assert_same(draft, reference(*arguments, 5, 1, 5, num_branches), NAMES)
        assert draft.match_lengths.tolist() == [3]
        assert draft.tokens[0, 1:3].tolist() == [7, 8]


def test_a_warp_reads_on_after_a_shorter_match(device):
    """A text has 36 pieces, more than a block has warps. In every row, a match of two tokens is near the end,
    and one of three at another place."""
    places = [8150, 8191, 8192, 8193, 8200, 8447, 8448, 8997]
    text = torch.arange(9000).repeat(len(places), 1) + 10
    text[:, -3:], text[:, -30:-27] = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])
    for row, place in zip(text, places, strict=True):
        row[8999 - place - 2 : 8999 - place + 2] = torch.tensor([1, 2, 3, 5])
    lengths = torch.full((len(places),), 9000)
    for num_branches in (1, 2):
        draft = ops.ngram_draft(*to(device, (text, lengths)), 4, 1, 3, num_branches)
        assert draft.match_lengths.tolist() == [3] * len(places)
        assert draft.tokens[:, 1].tolist() == [5] * len(places)


def test_a_long_text_equals_the_index(device):
    """All warps of the block, several pieces of the text each."""
    for words in (1, 3, 60):
        text = torch.randint(words, (12_345,), generator=generator(words))
        index = NgramIndex(1, 6)
        index.extend(text.numpy())
        for num_tokens, num_branches in ((10, 1), (30, 6)):
            arguments = to(device, (text[None], torch.tensor([len(text)])))
            draft = ops.ngram_draft(*arguments, num_tokens + 1, 1, 6, num_branches)
            expected = NgramIndex.propose_batch([index], num_tokens, num_branches)
            assert_same(draft[:2], map(torch.from_numpy, expected), NAMES[:2])


@pytest.mark.parametrize("length", [0, -1, 21, 2**40, -(2**63)])
def test_rows_without_a_text_are_inactive(length, device):
    tokens, lengths = random_texts(3, 20)
    lengths[1] = length
    draft = ops.ngram_draft(*to(device, (tokens, lengths)), 8)
    assert_same(draft, reference(tokens, lengths, 8, 2, 6, 1), NAMES)
    assert draft.tokens[1].tolist() == [0] * 8 and draft.parents[1].tolist() == [-2] * 8
    assert draft.match_lengths[1] == 0


def test_strided_inputs_equal_reference(device):
    arguments = random_texts(4, 60, seed=1)
    given = (strided(each, device, UNUSED) for each in arguments)
    assert_same(ops.ngram_draft(*given, 9, 1, 3, 3), reference(*arguments, 9, 1, 3, 3), NAMES)
    tokens, lengths = to(device, arguments)
    transposed = tokens.t().contiguous().t()
    draft = ops.ngram_draft(transposed, lengths, 9, 1, 3, 3)
    assert_same(draft, reference(*arguments, 9, 1, 3, 3), NAMES)
    paddings = torch.tensor([2, 0, 1, 0])
    given = strided(paddings, device, UNUSED)
    draft = ops.ngram_draft(tokens, lengths, 9, 1, 3, 3, given)
    assert_same(draft, reference(*arguments, 9, 1, 3, 3, paddings), NAMES)


def test_a_row_does_not_depend_on_the_others(device):
    arguments = to(device, random_texts(5, 120, seed=2))
    check_rows_alone(lambda *given: ops.ngram_draft(*given, 12, 1, 4, 3), arguments, NAMES)


@pytest.mark.parametrize("shape", [(2, 30), (0, 3), (1, 0)])
def test_opcheck(shape, device):
    arguments = to(device, random_texts(*shape))
    torch.library.opcheck(torch.ops.specdec.ngram_draft, (*arguments, 6, 1, 3, 2))
    paddings = torch.zeros_like(arguments[1])
    torch.library.opcheck(torch.ops.specdec.ngram_draft, (*arguments, 6, 1, 3, 2, paddings))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens", lambda t: t.int(), r"must be torch.int64, got torch.int32; convert"),
        ("tokens", lambda t: t[0], r"must be \[batch, capacity\], got shape \[9\]"),
        ("lengths", lambda t: t.float(), r"must be torch.int64, got torch.float32; convert"),
        ("lengths", lambda t: t[None], r"must be \[batch\] = \[1\], got shape \[1, 1\]"),
        ("nodes", lambda n: 0, r"must be 1 to 1024 \(node 0 is the root\), got 0"),
        ("nodes", lambda n: 1025, r"must be 1 to 1024 \(node 0 is the root\), got 1025"),
        ("min_ngram", lambda n: 0, r"must be at least 1, got 0"),
        ("max_ngram", lambda n: 1, r"must be at least min_ngram = 2, got 1"),
        ("max_ngram", lambda n: 65, r"must be at most 64 \(.*\), got 65"),
        ("num_branches", lambda n: 0, r"must be at least 1 \(1 drafts a chain\), got 0"),
        ("num_padded", lambda t: t.int(), r"must be torch.int64, got torch.int32; convert"),
        ("num_padded", lambda t: t[:0], r"must be \[batch\] = \[1\], got shape \[0\]"),
    ],
)
def test_rejects(name, change, message):
    names = ["tokens", "lengths", "nodes", "min_ngram", "max_ngram", "num_branches", "num_padded"]
    values = *random_texts(1, 9), 4, 2, 3, 1, torch.tensor([0])
    arguments = dict(zip(names, values, strict=True))
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"::ngram_draft: argument {name} {message}"):
        ops.ngram_draft(**arguments)


def test_rejects_a_row_of_too_many_tokens():
    tokens = torch.zeros(1, 1, dtype=torch.int64).expand(1, 2**31)
    with pytest.raises(ValueError, match=r"argument tokens must have fewer than 2\^31 tokens"):
        ops.ngram_draft(tokens, torch.tensor([1]), 4)
