"""``sample_filter``: the op has the bits of its specification, and removes what transformers' warpers remove.

Transformers computes probabilities in float32 and sorts ties in any order. So as many tokens are left as with
transformers, and they are the same ones where the scores at the end of the nucleus don't tie.
"""

import pytest
import torch
from helpers.ops.op_cases import check_rows_alone, generator, to, two_threads

from specdec_ext import ops
from specdec_ext.reference.exp import exp_nonpositive
from specdec_ext.reference.sample_filter import sample_filter as sample_filter_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = torch.inf, torch.nan

CASES = {  # name: (rows, vocab, standard deviation of the logits)
    "one-of-everything": (1, 1, 1.0),
    "vocab-2": (4, 2, 1.0),
    "vocab-63": (3, 63, 3.0),
    "vocab-64": (3, 64, 3.0),
    "vocab-65": (3, 65, 3.0),
    "vocab-1001": (3, 1001, 0.01),
    "vocab-4100": (2, 4100, 5.0),
    "vocab-9001": (2, 9001, 40.0),
    "empty": (0, 10, 1.0),
}


def random_parameters(rows, vocab, seed):
    """Each filter is off in some rows; the last row has all of them."""
    rng = generator(seed)
    on = torch.rand(3, rows, generator=rng) < 0.6
    on[:, -1:] = True
    temperature = torch.rand(rows, generator=rng) * 2 + 0.1
    top_k = torch.randint(1, min(vocab, 60) + 2, (rows,), generator=rng) * on[0]
    top_p = torch.where(on[1], torch.rand(rows, generator=rng), 1.0)
    min_p = torch.where(on[2], torch.rand(rows, generator=rng) ** 4, 0.0)
    return temperature, top_k, top_p, min_p


def random_arguments(rows, vocab, scale=3.0, *, dtype=torch.float32, seed=0):
    logits = torch.randn(rows, vocab, generator=generator(seed)) * scale
    return logits.to(dtype), *random_parameters(rows, vocab, seed + 1)


def one_row(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return (
        torch.as_tensor(logits)[None],
        torch.tensor([float(temperature)]),
        torch.tensor([top_k]),
        torch.tensor([float(top_p)]),
        torch.tensor([float(min_p)]),
    )


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype == torch.float32 and actual.shape == expected.shape
    actual = actual.cpu()
    nan = actual.isnan() & expected.isnan()
    different = (actual.view(torch.int32) != expected.view(torch.int32)) & ~nan
    assert not different.any(), (
        f"{int(different.sum())} scores differ, first {different.nonzero()[0]}"
    )


def warped(logits, temperature, top_k, top_p, min_p):
    """Transformers' chain on one row of float32 scores."""
    # Imported here, because the tests on CUDA run with torch alone (make gpu-check).
    from transformers.generation import logits_process as hf

    scores = hf.TemperatureLogitsWarper(float(temperature))(None, logits[None].float())
    if top_k > 0:
        scores = hf.TopKLogitsWarper(int(top_k))(None, scores)
    if top_p < 1:
        scores = hf.TopPLogitsWarper(float(top_p))(None, scores)
    if min_p > 0:
        scores = hf.MinPLogitsWarper(float(min_p))(None, scores)
    return scores[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, dtype, device):
    arguments = random_arguments(*CASES[case], dtype=dtype, seed=len(case))
    actual = ops.sample_filter(*to(device, arguments))
    assert_same_bits(actual, sample_filter_reference(*arguments))


@pytest.mark.parametrize("case", ["flat", "peaked", "crowded", "negative", "both-signs", "holes"])
def test_unusual_scores_equal_reference(case, device):
    """Thousands of ties, all keys in one bucket, keys of both signs, a top-k above the number of blocks and
    threads."""
    rng = generator(3)
    base = torch.randn(4, 5003, generator=rng)
    logits = {
        "flat": torch.zeros(4, 5003),
        "peaked": base + 40 * torch.nn.functional.one_hot(torch.tensor([5] * 4), 5003),
        "crowded": 17 + base * 1e-6,
        "negative": base * 3 - 100,
        "both-signs": (base * 3).round() / 2,
        "holes": base.masked_fill(torch.rand(4, 5003, generator=rng) < 0.8, -INF),
    }[case]
    arguments = (
        logits,
        torch.tensor([1.0, 0.7, 1.3, 1.0]),
        torch.tensor([0, 2500, 37, 1030]),
        torch.tensor([0.9, 0.999, 0.5, 1.0]),
        torch.tensor([0.0, 0.0, 0.1, 1e-3]),
    )
    actual = ops.sample_filter(*to(device, arguments))
    assert_same_bits(actual, sample_filter_reference(*arguments))


@pytest.mark.parametrize("vocab", [640, 645])
def test_top_k_around_the_number_of_segments(vocab, device):
    """The kernels take the k largest of the 5 or 6 segments of 128 tokens as a bound, if there are k."""
    logits = torch.randn(4, vocab, generator=generator(4))
    ones = torch.ones(4)
    arguments = (logits, ones, torch.tensor([4, 5, 6, 7]), ones, ones * 0)
    actual = ops.sample_filter(*to(device, arguments))
    assert_same_bits(actual, sample_filter_reference(*arguments))


def test_worked_example(device):
    """Halved by the temperature: 0, 3, 2, 1, 3. Top-k of 3 leaves 3, 3, 2 with shares .422, .422, .155; the
    nucleus of .9 needs all three, that of .8 the two 3s, that of .4 one of them, the last; min-p of a half
    drops e^-1."""
    logits = torch.tensor([0.0, 6.0, 4.0, 2.0, 6.0])
    rows = [
        (0, 1.0, 0.0, [0.0, 3.0, 2.0, 1.0, 3.0]),
        (3, 1.0, 0.0, [-INF, 3.0, 2.0, -INF, 3.0]),
        (3, 0.9, 0.0, [-INF, 3.0, 2.0, -INF, 3.0]),
        (3, 0.8, 0.0, [-INF, 3.0, -INF, -INF, 3.0]),
        (3, 0.4, 0.0, [-INF, -INF, -INF, -INF, 3.0]),
        (1, 1.0, 0.0, [-INF, 3.0, -INF, -INF, 3.0]),
        (0, 1.0, 0.5, [-INF, 3.0, -INF, -INF, 3.0]),
        (0, 0.0, 0.0, [-INF, -INF, -INF, -INF, 3.0]),
    ]
    top_k, top_p, min_p, expected = zip(*rows, strict=True)
    arguments = (
        logits.expand(len(rows), 5),
        torch.full((len(rows),), 2.0),
        torch.tensor(top_k),
        torch.tensor(top_p),
        torch.tensor(min_p),
    )
    assert ops.sample_filter(*to(device, arguments)).tolist() == [list(row) for row in expected]


@pytest.mark.parametrize("scale", [0.3, 3.0, 10.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_removes_what_transformers_removes(dtype, scale):
    arguments = random_arguments(60, 3000, scale, dtype=dtype, seed=9)
    actual = ops.sample_filter(*arguments)
    divided = arguments[0].float() / arguments[1][:, None]
    removed = 0
    for row, ours in enumerate(actual):
        theirs = warped(arguments[0][row], *(parameter[row] for parameter in arguments[1:]))
        assert torch.equal(ours.sort().values, theirs.sort().values)
        smallest = ours[ours > -INF].min()
        assert torch.equal(ours > smallest, theirs > smallest)
        if (divided[row] == smallest).sum() == 1:
            assert torch.equal(ours, theirs)
        removed += int((ours == -INF).sum())
    assert removed > 60 * 3000 / 4


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_kept_mass_is_within_its_error_bound(scale, top_p):
    """The bound of the header: the op's nucleus is that of a `top_p` within the bound of the given one."""
    vocab = 20_000
    bound = vocab * 2.0**-40 + 2 * 8.1e-8 + 2.0**-32
    logits = torch.randn(6, vocab, generator=generator(1)) * scale
    ones = torch.ones(6)
    kept = ops.sample_filter(logits, ones, ones.long() * 0, ones * top_p, ones * 0) > -INF
    probabilities = logits.double().softmax(-1)
    last = logits.masked_fill(~kept, INF).argmin(-1, keepdim=True)
    mass = (probabilities * kept).sum(-1)
    assert (mass >= top_p - bound).all()
    assert (mass - probabilities.gather(-1, last)[:, 0] < top_p + bound).all()


def test_float64_reference_agrees_away_from_boundaries():
    arguments = random_arguments(40, 500, seed=5)
    exact = sample_filter_reference(arguments[0].double(), *arguments[1:])
    assert torch.equal(ops.sample_filter(*arguments) > -INF, exact > -INF)


def test_rows_without_a_choice_pass_through(device):
    """NaN stays for verify_match to find, all -inf stays; +inf has all the probability."""
    logits = torch.randn(4, 300, generator=generator(2))
    logits[0, 200] = NAN
    logits[1] = -INF
    logits[2, [3, 70, 250]] = INF
    logits[3, :299] = -INF
    rows = torch.ones(4)
    arguments = (logits, rows, rows.long() * 5, rows * 0.6, rows * 0.1)
    actual = ops.sample_filter(*to(device, arguments)).cpu()
    assert_same_bits(actual, sample_filter_reference(*arguments))
    assert torch.equal(actual[0].nan_to_num(7), logits[0].nan_to_num(7))
    assert (actual[1] == -INF).all()
    assert (actual[2] == INF).nonzero().flatten().tolist() == [70, 250]
    assert actual[2].isinf().all()
    assert (actual[3] > -INF).nonzero().flatten().tolist() == [299]


@pytest.mark.parametrize("place", [0, 63, 64, 4095, 4096, 5000])
def test_a_single_nan_is_found_wherever_it_is(place, device):
    logits = torch.randn(5001, generator=generator(1))
    logits[place] = NAN
    scores = ops.sample_filter(*to(device, one_row(logits, top_k=3))).cpu()
    assert scores.isnan().nonzero().tolist() == [[0, place]]
    assert (scores > -INF).sum() == 5000


def test_zeros_of_both_signs_tie(device):
    logits = torch.tensor([0.0, -0.0, -1.0, 0.0, -0.0])
    scores = ops.sample_filter(*to(device, one_row(logits, top_k=1)))
    assert scores.tolist() == [[0.0, 0.0, -INF, 0.0, 0.0]]
    scores = ops.sample_filter(*to(device, one_row(logits, top_p=0.3)))
    assert (scores > -INF).tolist() == [[False, False, False, True, True]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs_equal_reference(dtype, device):
    """Logits sliced out of a NaN-filled buffer at an odd offset, strided parameters."""
    arguments = random_arguments(5, 101, dtype=dtype, seed=3)
    buffer = torch.full((6, 2, 205), NAN, dtype=dtype, device=device)
    buffer[1:, 1, 7:108] = arguments[0].to(device)
    parameters = [
        torch.stack([argument, -torch.ones_like(argument)], -1).to(device)[:, 0]
        for argument in arguments[1:]
    ]
    actual = ops.sample_filter(buffer[1:, 1, 7:108], *parameters)
    assert_same_bits(actual, sample_filter_reference(*arguments))


def test_a_row_does_not_depend_on_the_others(device):
    arguments = to(device, random_arguments(3, 301, seed=9))
    check_rows_alone(lambda *given: (ops.sample_filter(*given),), arguments, ["scores"])


def test_threads_do_not_change_the_result():
    arguments = random_arguments(7, 30_001, seed=2)
    expected = ops.sample_filter(*arguments)
    with two_threads():
        for _ in range(20):
            assert_same_bits(ops.sample_filter(*arguments), expected)


def isa_results():
    cases = (random_arguments(9, 5003, dtype=dtype, seed=1) for dtype in DTYPES)
    return [ops.sample_filter(*arguments) for arguments in cases]


def test_large_vocabulary_equals_reference():
    for dtype in DTYPES:
        arguments = random_arguments(4, 128_256, 4.0, dtype=dtype, seed=4)
        assert_same_bits(ops.sample_filter(*arguments), sample_filter_reference(*arguments))


def test_exp_is_exact_to_an_ulp_and_never_decreases():
    """The searches rely on the order. The C++ self test compares more values."""
    x = -torch.cat([torch.rand(200_000, generator=generator(0)) * 87, torch.zeros(1)])
    value, exact = exp_nonpositive(x), x.double().exp()
    assert ((value - exact).abs() <= 8.1e-8 * exact).all()
    assert exp_nonpositive(torch.tensor([0.0, 1.0, -87.5, -INF])).tolist() == [1, 1, 0, 0]
    assert (exp_nonpositive(x.sort().values).diff() >= 0).all()


@pytest.mark.parametrize("shape", [(2, 70), (0, 9), (1, 1)])
def test_opcheck(shape):
    arguments = random_arguments(*shape, dtype=torch.bfloat16)  # the scores are of float32
    torch.library.opcheck(torch.ops.specdec.sample_filter, arguments)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t.double(), r"argument logits must be torch.float32, .* got torch.float64"),
        (0, lambda t: t[0], r"argument logits must be \[rows, vocab\], got shape \[6\]"),
        (0, lambda t: t[:, :0], r"argument logits must have a vocabulary of 1 to 4194304 tokens"),
        (0, lambda t: t[:, ::2], r"argument logits must be contiguous in its last .* stride 2"),
        (1, lambda t: t.double(), r"argument temperature must be torch.float32, got torch.float64"),
        (1, lambda t: t[0], r"argument temperature must be \[rows\] = \[2\], got shape \[\]"),
        (2, lambda t: t.int(), r"argument top_k must be torch.int64, got torch.int32; convert"),
        (3, lambda t: t[:1], r"argument top_p must be \[rows\] = \[2\], got shape \[1\]"),
        (4, lambda t: t.half(), r"argument min_p must be torch.float32, got torch.float16"),
        (1, lambda t: t * 0, r"temperature\[0\] = 0.0+; expected a positive number; greedy"),
        (1, lambda t: t * NAN, r"temperature\[0\] = nan; expected a positive number"),
        (2, lambda t: t - 2, r"top_k\[1\] = -1; expected 0 \(off\) or more"),
        (3, lambda t: t * 1.5, r"top_p\[0\] = 1.5\d*; expected a number in \[0, 1\], 1 is off"),
        (3, lambda t: t * NAN, r"top_p\[0\] = nan; expected a number in \[0, 1\]"),
        (4, lambda t: t - 1, r"min_p\[0\] = -1.0+; expected a number in \[0, 1\], 0 is off"),
    ],
)
def test_rejects(index, change, message):
    ones = torch.ones(2)
    arguments = [torch.zeros(2, 6), ones, torch.tensor([3, 1]), ones, torch.zeros(2)]
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match="specdec::sample_filter: " + message):
        ops.sample_filter(*arguments)
