"""``verify_rejection``, ``verify_recursive``, ``verify_block``: the ops equal their specification.

Tokens, paths and counts are compared exactly. The specification decides in float64 and the ops in float32,
but in these cases no uniform number is within float32's error of its threshold. Every device gives the same
bits. ``test_distribution_sampled.py`` tests the distribution of the emitted tokens.
"""

import pytest
import torch
from helpers.ops.op_cases import (
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
from specdec_ext.reference import rng
from specdec_ext.reference import verify_sampled as reference

NAMES = list(ops.HostMatchResult._fields)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULES = ["rejection", "recursive", "block"]
INF, NAN = torch.inf, torch.nan
UNIFORMS = [0.204106, 0.113635, 0.153747, 0.222441, 0.079117, 0.979816]  # of the worked examples

CASES = {  # name: (batch, nodes, vocab)
    "one-of-everything": (1, 1, 1),
    "root-only": (4, 1, 1000),
    "vocab-2": (20, 9, 2),
    "vocab-127": (5, 12, 127),
    "vocab-128": (5, 12, 128),
    "vocab-129": (5, 12, 129),
    "vocab-1025": (3, 8, 1025),
    "many-segments": (1, 4, 33 * 1024 + 3),
    "many-rows": (40, 4, 9),
    "max-nodes": (1, ops.MAX_NODES, 3),
    "empty-batch": (0, 3, 10),
}


def run(rule, arguments):
    return getattr(ops, f"verify_{rule}")(*arguments)


def expect(rule, arguments):
    return getattr(reference, f"verify_{rule}")(*arguments)


def drawn_tokens(draft_probs, parents, seed):
    """Tokens of all nodes, siblings drawn without replacement from their parent's distribution."""
    noise = torch.rand(draft_probs.shape, generator=generator(seed))
    order = (draft_probs / -noise.log()).argsort(dim=-1, descending=True)
    tokens = torch.zeros_like(parents)
    for row, links in enumerate(parents.tolist()):
        for node, parent in enumerate(links):
            if 0 <= parent < node:
                ordinal = links[:node].count(parent)
                tokens[row, node] = order[row, parent, ordinal % order.shape[-1]]
    return tokens


def random_arguments(batch, nodes, vocab, *, dtype=torch.float32, illegal=0.0, chain=False, seed=0):
    random = generator(seed)
    logits = (torch.randn(batch, nodes, vocab, generator=random) * 2).to(dtype)
    guess = logits.float() + torch.randn(batch, nodes, vocab, generator=random)
    draft_probs = guess.softmax(dim=-1) * torch.rand(batch, nodes, 1, generator=random)
    parents = random_parents(batch, nodes, seed, illegal=illegal)
    if chain:
        parents = torch.arange(-1, nodes - 1).expand(batch, -1)
    tokens = drawn_tokens(draft_probs, parents, seed)
    strange = torch.rand(batch, nodes, generator=random) < illegal
    tokens[strange] = torch.randint(-1, vocab + 1, tokens[strange].shape, generator=random)
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=random)
    root_positions = torch.randint(2**33, (batch,), generator=random)
    return logits, draft_probs, tokens, parents, root_positions, seeds, torch.arange(batch)


def rows_of(target, draft, token, batch=1, **changes):
    """Arguments of `batch` equal rows: a root with both distributions and one child with `token`."""
    logits = torch.as_tensor(target, dtype=torch.float32).log()
    draft = torch.as_tensor(draft, dtype=torch.float32)
    nodes = 2
    arguments = {
        "logits": logits.expand(batch, nodes, -1),
        "draft_probs": draft.expand(batch, nodes, -1),
        "tokens": torch.tensor([[0, token]]).expand(batch, -1),
        "parents": torch.tensor([[-1, 0]]).expand(batch, -1),
        "root_positions": torch.full((batch,), 4),
        "seeds": torch.full((batch,), 1),
        "row_ids": torch.arange(batch),
    }
    return {**arguments, **changes}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, rule, device):
    illegal = 0.2 if CASES[case][1] > 5 else 0.0
    arguments = random_arguments(*CASES[case], illegal=illegal, seed=len(case))
    assert_same(run(rule, to(device, arguments)), expect(rule, arguments), NAMES)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_equals_reference_in_16_bits(dtype, rule, device):
    arguments = random_arguments(10, 8, 70, dtype=dtype, seed=3)
    assert_same(run(rule, to(device, arguments)), expect(rule, arguments), NAMES)


@pytest.mark.parametrize("rule", RULES)
def test_chains_equal_reference(rule, device):
    arguments = random_arguments(20, 7, 40, chain=True, seed=1)
    result = run(rule, to(device, arguments))
    assert_same(result, expect(rule, arguments), NAMES)
    assert len(set(result.num_accepted.tolist())) >= 4


def test_siblings_beyond_the_first_are_accepted():
    arguments = random_arguments(60, 30, 20, seed=2)
    result = ops.verify_recursive(*arguments)
    first = [row.index(0) for row in arguments[3].tolist()]
    later = [path[1] not in (-1, child) for path, child in zip(result.path, first, strict=True)]
    assert sum(later) > 5


def test_rejection_equals_recursive_on_chains():
    arguments = random_arguments(300, 7, 40, chain=True, seed=6)
    assert_same(ops.verify_rejection(*arguments), ops.verify_recursive(*arguments), NAMES)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chain_rules_see_first_children_only(rule):
    """Other children have no effect: the emitted tokens are those of the chain."""
    arguments = random_arguments(50, 9, 12, seed=7)
    parents, tokens = arguments[3], arguments[2].clone()
    chain = [
        [links.index(n) if n in links else None for n in range(9)] for links in parents.tolist()
    ]
    for row, first in enumerate(chain):
        others = [n for n in range(1, 9) if n not in first]
        tokens[row, others] = -77
    changed = (*arguments[:2], tokens, *arguments[3:])
    assert_same(run(rule, changed), run(rule, arguments), NAMES)


def uniform_of(row_id, depth=0, ordinal=0):
    """The acceptance's random number in the rows of :func:`rows_of`."""
    stream = map(torch.tensor, (1, row_id, 4))
    bits = rng.round_bits(*stream, depth, rng.PURPOSE_ACCEPT, 4 * ordinal + 1)
    return rng.accept_uniform(bits)[-1].item()


@pytest.mark.parametrize("rule", RULES)
def test_worked_example(rule, device):
    """Target (1/2, 1/4, 1/4), draft (3/4, 1/4, 0), drafted token 0: accepted where u < 2/3; otherwise
    the residual is (0, 0, 1/4), so the correction is token 2."""
    arguments = rows_of([0.5, 0.25, 0.25], [0.75, 0.25, 0.0], 0, batch=6)
    result = run(rule, to(device, arguments.values()))
    uniforms = [uniform_of(row) for row in range(6)]
    assert uniforms == pytest.approx(UNIFORMS, abs=1e-6)
    accepted = [u < 2 / 3 for u in uniforms]
    assert result.num_accepted.tolist() == [int(a) for a in accepted]
    assert result.path.tolist() == [[0, 1] if a else [0, -1] for a in accepted]
    assert all(a or token == 2 for a, token in zip(accepted, result.next_token, strict=True))
    assert 0 < sum(accepted) < 6


def test_worked_example_with_two_siblings(device):
    """Target (1/2, 1/4, 1/4), draft (1/2, 1/2, 0). Sibling 1 is accepted where u < 1/2; then the target
    is (0, 0, 1) and the draft (1, 0, 0): sibling 0 is never accepted and the correction is token 2."""
    arguments = rows_of([0.5, 0.25, 0.25], [0.5, 0.5, 0.0], 1, batch=6)
    three = {"logits": 3, "draft_probs": 3}
    for name, nodes in three.items():
        arguments[name] = arguments[name][:, :1].expand(-1, nodes, -1)
    arguments["tokens"] = torch.tensor([[0, 1, 0]]).expand(6, -1)
    arguments["parents"] = torch.tensor([[-1, 0, 0]]).expand(6, -1)
    result = ops.verify_recursive(*to(device, arguments.values()))
    accepted = [uniform_of(row) < 0.5 for row in range(6)]
    assert result.num_accepted.tolist() == [int(a) for a in accepted]
    assert result.path[:, 1].tolist() == [1 if a else -1 for a in accepted]
    assert all(a or token == 2 for a, token in zip(accepted, result.next_token, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_draft_that_equals_the_target_is_always_accepted(rule):
    logits = torch.randn(1, 5, 30, generator=generator(1)).expand(2000, -1, -1)
    draft_probs = logits.softmax(dim=-1)
    parents = torch.arange(-1, 4).expand(2000, -1)
    tokens = drawn_tokens(draft_probs, parents, 2)
    zeros = torch.zeros(2000, dtype=torch.long)
    result = run(rule, (logits, draft_probs, tokens, parents, zeros, zeros, torch.arange(2000)))
    assert (result.num_accepted == 4).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("probability", [0.9, 1e-6, 1e-44], ids=str)
def test_a_token_of_target_probability_zero_is_never_accepted(probability, rule):
    """Even where u * draft underflows to 0: the comparison is strict."""
    draft = [1 - probability, probability, 0.0]
    arguments = rows_of([0.5, 0.0, 0.5], draft, 1, batch=3000)
    result = run(rule, arguments.values())
    assert (result.num_accepted == 0).all()
    assert (result.next_token != 1).all()


@pytest.mark.parametrize("rule", RULES)
def test_disjoint_supports_accept_nothing(rule, device):
    arguments = rows_of([0.5, 0.5, 0, 0], [0, 0, 0.25, 0.75], 3, batch=12)
    result = run(rule, to(device, arguments.values()))
    assert (result.num_accepted == 0).all()
    assert set(result.next_token.tolist()) == {0, 1}


@pytest.mark.parametrize("rule", RULES)
def test_distributions_with_a_single_token(rule, device):
    certain = [0.0] * 200 + [1.0] + [0.0] * 900
    agreed = run(rule, to(device, rows_of(certain, certain, 200, batch=3).values()))
    assert agreed.num_accepted.tolist() == [1] * 3 and agreed.next_token.tolist() == [200] * 3
    other = [1.0] + [0.0] * 1100
    refused = run(rule, to(device, rows_of(certain, other, 0, batch=3).values()))
    assert refused.num_accepted.tolist() == [0] * 3 and refused.next_token.tolist() == [200] * 3


def test_duplicate_sibling_is_passed_over():
    """It can't have been drawn without replacement; the tree is verified as if it were not there."""
    arguments = list(random_arguments(400, 4, 6, seed=9))
    arguments[2] = arguments[2][:, [0, 1, 1, 3]]
    arguments[3] = torch.tensor([[-1, 0, 0, -2]]).expand(400, -1)
    twice = ops.verify_recursive(*arguments)
    arguments[3] = torch.tensor([[-1, 0, -2, -2]]).expand(400, -1)
    assert_same(twice, ops.verify_recursive(*arguments), NAMES)
    assert (twice.num_accepted == 0).sum() > 50


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("draft", "token"),
    [
        ([0.5, 0.5, 0.0], 2),
        ([0.5, 0.5, 0.0], -1),
        ([0.5, 0.5, 0.0], 3),
        ([0.0, 0.0, 0.0], 1),
        ([NAN, NAN, NAN], 1),
        ([-1.0, -1.0, -1.0], 1),
        ([INF, INF, INF], 1),
        ([1e30, 1e30, 1e30], 1),
        ([1e-30, 1e-30, 1e-30], 1),
    ],
    ids=["zero", "below", "beyond", "no-mass", "nan", "negative", "inf", "huge", "tiny"],
)
def test_a_child_that_cannot_have_been_drawn_is_passed_over(draft, token, rule, device):
    arguments = rows_of([0.2, 0.3, 0.5], draft, token, batch=8)
    result = run(rule, to(device, arguments.values()))
    alone = {**arguments, "parents": torch.tensor([[-1, -2]]).expand(8, -1)}
    assert_same(result, run(rule, to(device, alone.values())), NAMES)
    assert set(result.next_token.tolist()) <= {0, 1, 2} and (result.status == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_bad_draft_probabilities_count_as_zero(rule, device):
    arguments = random_arguments(10, 6, 50, seed=4)
    clean, dirty = arguments[1].clone(), arguments[1].clone()
    for place, value in ((3, NAN), (17, -0.5), (29, INF), (31, -INF)):
        clean[..., place], dirty[..., place] = 0, value
    expected = run(rule, to(device, (arguments[0], clean, *arguments[2:])))
    assert_same(run(rule, to(device, (arguments[0], dirty, *arguments[2:]))), expected, NAMES)


@pytest.mark.parametrize("rule", RULES)
def test_scaling_draft_probabilities_changes_nothing(rule):
    arguments = random_arguments(200, 8, 20, seed=4)
    for scale in (2.0**-20, 64.0):
        scaled = (arguments[0], arguments[1] * scale, *arguments[2:])
        assert_same(run(rule, scaled), run(rule, arguments), NAMES)


@pytest.mark.parametrize("rule", RULES)
def test_infinite_and_lowest_logits(rule, device):
    """+inf has all the probability; the lowest finite logit is a legal one."""
    rows = {"inf": [0.0, INF, INF, 3e38], "lowest": [-3.4e38, -INF, -INF, -INF]}
    for name, allowed in (("inf", {1, 2}), ("lowest", {0})):
        arguments = rows_of([1.0] * 4, [0.25] * 4, 3, batch=8)
        arguments["logits"] = torch.tensor(rows[name]).expand(8, 2, -1)
        result = run(rule, to(device, arguments.values()))
        assert set(result.next_token.tolist()) == allowed and (result.status == 0).all()
        assert (result.num_accepted == 0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_or_nothing_finite_at_a_visited_node(dtype, rule, device):
    certain = torch.tensor([-INF, 0.0] + [-INF] * 1100)
    for status, bad in ((1, certain.clone()), (2, torch.full((1102,), -INF))):
        if status == 1:
            bad[1030] = -NAN
        for nodes, walked in (([certain, bad, certain], 0), ([bad, certain, certain], -1)):
            logits = torch.stack(nodes)[None].to(dtype)
            zeros = torch.zeros(1, dtype=torch.long)
            arguments = (
                logits,
                torch.full(logits.shape, 0.5),
                torch.tensor([[0, 1, 1]]),
                torch.tensor([[-1, 0, 1]]),
                *(zeros, zeros, zeros),
            )
            result = run(rule, to(device, arguments))
            assert result.status.tolist() == [status] and result.next_token.tolist() == [-1]
            assert result.num_accepted.tolist() == [walked]
            assert result.path.tolist() == [[0, -1, -1] if walked == 0 else [-1] * 3]


def test_block_does_not_look_behind_an_impossible_token():
    """Nothing after a token of target probability 0 can be accepted, so NaN there has no effect."""
    arguments = rows_of([0.5, 0.5, 0.0], [0.2, 0.2, 0.6], 2, batch=20)
    arguments["logits"] = arguments["logits"].clone()
    arguments["logits"][:, 1] = NAN
    result = ops.verify_block(*arguments.values())
    assert (result.status == 0).all() and (result.num_accepted == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_unvisited_distributions_may_hold_nan(rule, device):
    """Logits of nodes off the examined path; draft distributions of those and of leaves."""
    arguments = random_arguments(20, 10, 30, illegal=0.1, seed=8)
    expected = run("recursive" if rule == "recursive" else "rejection", arguments)
    logits, draft_probs = (torch.full_like(tensor, NAN) for tensor in arguments[:2])
    for row, path in enumerate(expected.path):
        visited = path[path >= 0]
        if rule == "block":  # the whole chain is examined
            visited = chain_of(arguments[3][row].tolist())
        logits[row, visited] = arguments[0][row, visited]
        inner = [n for n in visited if n in arguments[3][row]]
        draft_probs[row, inner] = arguments[1][row, inner]
    actual = run(rule, to(device, (logits, draft_probs, *arguments[2:])))
    assert_same(actual, run(rule, arguments), NAMES)


def chain_of(links):
    """The nodes of the chain of first children."""
    if links[0] != -1:
        return []
    chain = [0]
    while chain[-1] in links[chain[-1] + 1 :]:
        chain.append(links.index(chain[-1], chain[-1] + 1))
    return chain


@pytest.mark.parametrize("rule", RULES)
def test_strided_inputs_equal_reference(rule, device):
    """All arguments are strided, the distributions between NaN."""
    arguments = random_arguments(5, 6, 101, dtype=torch.bfloat16, seed=3)
    distributions = [sliced(each, device) for each in arguments[:2]]
    others = [strided(each, device, 1) for each in arguments[2:]]
    assert_same(run(rule, (*distributions, *others)), expect(rule, arguments), NAMES)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_depend_on_the_others(rule, device):
    arguments = to(device, random_arguments(4, 6, 1500, seed=9))
    check_rows_alone(getattr(ops, f"verify_{rule}"), arguments, NAMES)


@pytest.mark.parametrize("rule", RULES)
def test_threads_and_repeats_do_not_change_the_result(rule):
    arguments = random_arguments(3, 6, 70_001, seed=2)
    expected = run(rule, arguments)
    with two_threads():
        for _ in range(5):
            assert_same(run(rule, arguments), expected, NAMES)


def isa_results():
    cases = [random_arguments(40, 9, 1203, illegal=0.1, seed=1, dtype=dtype) for dtype in DTYPES]
    return [tuple(run(rule, arguments)) for arguments in cases for rule in RULES]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(2, 5, 70), (0, 3, 9)])
def test_opcheck(shape, rule):
    op = getattr(torch.ops.specdec, f"verify_{rule}")
    torch.library.opcheck(op, random_arguments(*shape))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logits", lambda t: t.double(), r"must be torch.float32, .* got torch.float64; convert"),
        ("logits", lambda t: t[0], r"must be \[batch, nodes, vocab\], got shape \[2, 6\]"),
        ("logits", lambda t: t[..., ::2], r"must be contiguous in its last .*, got stride 2; call"),
        ("logits", lambda t: t[:, :0], r"must have 1 to 1024 nodes .* got 0"),
        ("draft_probs", lambda t: t.bfloat16(), r"must be torch.float32, got torch.bfloat16; conv"),
        ("draft_probs", lambda t: t[:, :1], r"must be \[batch, nodes, vocab\] = \[1, 2, 6\], got"),
        (
            "draft_probs",
            lambda t: t.repeat(1, 1, 2)[..., ::2],
            r"must be contiguous .* stride 2; call",
        ),
        ("tokens", lambda t: t[:, :1], r"must be \[batch, nodes\] = \[1, 2\], got shape \[1, 1\]"),
        ("parents", lambda t: t[0], r"must be \[batch, nodes\] = \[1, 2\], got shape \[2\]"),
        ("root_positions", lambda t: t[:, None], r"must be \[batch\] = \[1\], got shape \[1, 1\]"),
        ("seeds", lambda t: t.expand(2), r"must be \[batch\] = \[1\], got shape \[2\]"),
        ("row_ids", lambda t: t.double(), r"must be torch.int64, got torch.float64"),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_rejects(name, change, message, rule):
    arguments = rows_of([1 / 6] * 6, [1 / 6] * 6, 1)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"specdec::verify_{rule}: argument {name} {message}"):
        getattr(ops, f"verify_{rule}")(**arguments)
