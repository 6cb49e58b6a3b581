"""``couple_logits``: the op has the bits of its specification.

Its largest score is the token that the match rule draws.
"""

from __future__ import annotations

import pytest
import torch
from helpers.ops.op_cases import check_rows_alone, generator, strided, to, two_threads
from torch import Tensor

from specdec_ext import ops
from specdec_ext.ops import DraftNoise
from specdec_ext.reference.couple_logits import couple_logits as couple_logits_reference
from specdec_ext.reference.verify_match import verify_match

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 3), (2, 127), (3, 257), (2, 2500), (0, 5)]  # (rows, vocab)


def random_arguments(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Logits, temperatures, seeds, row_ids and positions; the second row has no noise."""
    rng = generator(rows + vocab)
    logits = (torch.randn(rows, vocab, generator=rng) * 4).to(dtype)
    temperatures = torch.rand(rows, generator=rng) + 0.2
    temperatures[1:2] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=rng)
    row_ids = torch.randint(2**40, (rows,), generator=rng)
    positions = torch.randint(2**33, (rows,), generator=rng)
    return logits, temperatures, seeds, row_ids, positions


def couple(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, row_ids: Tensor, positions: Tensor
) -> Tensor:
    noise = DraftNoise(temperatures, seeds, row_ids)
    return ops.couple_logits(logits, noise, positions)


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_reference(size, dtype, has_ids, device):
    logits, *noise, positions = random_arguments(*size, dtype)
    vocab = size[1]
    ids = torch.randperm(3 * vocab, generator=generator(1))[:vocab] if has_ids else None
    expected = couple_logits_reference(logits, DraftNoise(*noise), positions, ids)
    on_device = ids if ids is None else ids.to(device)
    given, *others, at = to(device, (logits, *noise, positions))
    actual = ops.couple_logits(given, DraftNoise(*others), at, on_device)
    assert actual.dtype == torch.float32 and torch.equal(actual.cpu(), expected)


def test_largest_score_is_the_token_of_the_match_rule(device):
    """At temperature 1; at the position after the root's."""
    rows, vocab = 40, 50
    logits = torch.randn(rows, vocab, generator=generator(0)) * 2
    numbers = torch.arange(rows)
    seeds, row_ids, positions = numbers * 7, numbers % 3, numbers * 1000
    noise = DraftNoise(torch.ones(rows), seeds, row_ids)
    roots = torch.zeros(rows, 1).long(), torch.full((rows, 1), -1)
    flags = torch.ones(rows).bool()
    *_, expected, _ = verify_match(logits[:, None], *roots, positions, seeds, row_ids, flags)
    given, *others, at = to(device, (logits, *noise, positions + 1))
    actual = ops.couple_logits(given, DraftNoise(*others), at)
    assert torch.equal(actual.argmax(dim=1).cpu(), expected)


@pytest.mark.parametrize("temperature", [0.0, -0.5, torch.nan])
def test_rows_without_noise_are_converted(temperature, device):
    logits, _, *numbers = random_arguments(3, 200, torch.bfloat16)
    given, *others = to(device, (logits, torch.full((3,), temperature), *numbers))
    assert torch.equal(couple(given, *others).cpu(), logits.float())


def test_nan_and_infinities_stay(device):
    values = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    one = torch.ones(1, dtype=torch.long)
    scores = couple(*to(device, (values, torch.ones(1), one, one, one))).cpu()
    assert scores[0, 0].isnan() and scores[0, 1:3].tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("extreme", [-1, -(2**63), 2**63 - 1])
def test_ids_out_of_range_are_harmless(extreme, device):
    """Their noise is arbitrary; that of the others is right."""
    logits, *noise, positions = random_arguments(1, 300)
    ids = torch.arange(300)
    expected = couple_logits_reference(logits, DraftNoise(*noise), positions, ids)
    ids[7] = extreme
    given, *others, at, ids = to(device, (logits, *noise, positions, ids))
    scores = ops.couple_logits(given, DraftNoise(*others), at, ids).cpu()
    same = torch.arange(300) != 7
    assert torch.equal(scores[:, same], expected[:, same]) and scores.isfinite().all()


def test_strided_inputs(device):
    logits, *others = random_arguments(3, 130)
    expected = couple(logits, *others)
    wide = torch.full((3, 200), torch.nan, device=device)
    wide[:, 40:170] = logits.to(device)
    spread = [strided(each, device, 3) for each in others]
    assert torch.equal(couple(wide[:, 40:170], *spread).cpu(), expected)


def test_a_row_does_not_depend_on_the_others(device):
    arguments = to(device, random_arguments(3, 500))
    check_rows_alone(lambda *given: [couple(*given)], arguments, ["scores"])


def test_threads_do_not_change_the_result():
    arguments = random_arguments(7, 9000)
    expected = couple(*arguments)
    with two_threads():
        assert torch.equal(couple(*arguments), expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_opcheck(size, device):
    arguments = to(device, random_arguments(*size))
    torch.library.opcheck(torch.ops.specdec.couple_logits, arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits", torch.zeros(2, 3, dtype=torch.float64), "must be torch.float32, torch.bfloat16 or"),
        ("logits", torch.zeros(2, 3, 1), r"must be \[rows, vocab\], got shape \[2, 3, 1\]"),
        ("logits", torch.zeros(2, 0), r"must have a vocabulary of 1 to"),
        ("temperatures", torch.zeros(3), r"must be \[rows\] = \[2\], got shape \[3\]"),
        ("temperatures", torch.zeros(2).double(), r"must be torch.float32, got torch.float64"),
        ("seeds", torch.zeros(2), r"must be torch.int64, got torch.float32"),
        ("row_ids", torch.zeros(2).int(), r"must be torch.int64, got torch.int32"),
        ("positions", torch.zeros(1).long(), r"must be \[rows\] = \[2\], got shape \[1\]"),
        ("token_ids", torch.zeros(4).long(), r"must be \[vocab\] = \[3\], got shape \[4\]"),
    ],
)  # fmt: skip
def test_rejects(name, value, message, device):
    zeros = torch.zeros(2, dtype=torch.long)
    arguments = dict(logits=torch.zeros(2, 3), temperatures=torch.zeros(2), seeds=zeros, row_ids=zeros,
        positions=zeros, token_ids=torch.arange(3))  # fmt: skip
    arguments[name] = value
    logits, *noise, positions, ids = to(device, arguments.values())
    with pytest.raises(ValueError, match=rf"^specdec::couple_logits: argument {name} {message}"):
        ops.couple_logits(logits, DraftNoise(*noise), positions, ids)
