"""``decoder_layers``: against its specification, and against itself.

Accuracy: the error against a float64 evaluation of the specification is at most twice that of the
specification in plain PyTorch in the same dtype, plus a unit in the last place. Invariance: a node has the
same bits alone, in a tree and in a batch. Slots that no node may see hold NaN.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from helpers.ops.op_cases import generator, two_threads
from torch.nn import functional as F

from specdec_ext import ops
from specdec_ext.ops.decoder_layers import (
    LAYER_MATRICES,
    LAYER_TENSORS,
    LLAMA,
    Activation,
    DecoderForm,
    Norm,
)
from specdec_ext.ops.quantise import QuantisedWeight
from specdec_ext.reference.decoder_layers import decoder_layers as reference

DTYPES = [torch.float32, torch.bfloat16]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 6, 20, 28, 2
EXPERTS, EXPERT_INNER = 5, 9
PREFIXES = [(0, 9), (4, 5), (2, 0)]  # of each row, slot of the first token and number of tokens
START = 9
PARENTS = [-1, 0, 0, 1, 3]
OUTPUT_NORMS = {"attention_output_norm", "mlp_output_norm"}
INPUT_NORMS = {"attention_norm", "mlp_norm"}
HEAD_NORMS = {"query_norm", "key_norm"}
BIASES = {f"{name}_bias" for name in LAYER_MATRICES}
OF_EXPERTS = ("router", "experts_gate", "experts_down")


@dataclass(frozen=True)
class Design:
    """What layers have: optional tensors, joined matrices, and a form."""

    optional: frozenset[str] = frozenset(INPUT_NORMS)
    form: DecoderForm = LLAMA
    absent: frozenset[str] = frozenset()  # matrices; joined with one that is not, or no gate
    kv_heads: int = KV_HEADS
    rotary: int = HEAD_DIM
    rotations: int = 1
    wide_norms: bool = False
    wide_rotations: bool = False  # float32
    sparse: tuple[int, ...] = ()  # layers with experts
    has_shared: bool = False

    def has(self, layer, name):
        """Whether a layer has one of ``LAYER_TENSORS``."""
        matrix = name.removesuffix("_bias")
        if name in OF_EXPERTS:
            return layer in self.sparse
        if matrix == "shared_gate" and not (layer in self.sparse and self.has_shared):
            return False
        if matrix in ("gate", "up", "down") and layer in self.sparse and not self.has_shared:
            return False
        return (name in LAYER_MATRICES or name in self.optional) and matrix not in self.absent


def design(*sets, absent=(), form=None, **fields):
    optional = frozenset(INPUT_NORMS.union(*sets))
    return Design(optional, DecoderForm(**form or {}), frozenset(absent), **fields)


DESIGNS = {
    "llama": design(),
    "qwen": design(BIASES, HEAD_NORMS),
    "gemma": design(OUTPUT_NORMS, HEAD_NORMS, rotations=2, form=dict(norm=Norm.RMS_OFFSET,
        activation=Activation.GELU_TANH, softcap=1.5, tables=(0, 1))),
    "phi": design(absent=("key", "value", "up"), rotary=4),
    "joined-biases": design(BIASES, absent=("key", "value", "up")),
    "olmo": replace(design(form=dict(norm=Norm.RMS_WIDE), wide_norms=True, wide_rotations=True),
        optional=frozenset(OUTPUT_NORMS | HEAD_NORMS)),
    "granite": design(form=dict(residual_scale=0.3)),
    "smollm": design(form=dict(tables=(-1, 0))),
    "no-rotation": design(HEAD_NORMS, rotations=0, form=dict(tables=(-1, -1))),
    "starcoder": design(BIASES, {"attention_norm_bias", "mlp_norm_bias"}, absent=("gate",),
        form=dict(norm=Norm.LAYER, activation=Activation.GELU_TANH)),
    "neox": design(BIASES, {"attention_norm_bias", "mlp_norm_bias"}, absent=("key", "value", "gate"),
        kv_heads=HEADS, rotary=2, form=dict(norm=Norm.LAYER, activation=Activation.GELU,
        interleaved=True, parallel=True)),
    "gpt2": design(BIASES, {"attention_norm_bias", "mlp_norm_bias"}, absent=("key", "value", "gate"),
        kv_heads=HEADS, rotations=0, form=dict(norm=Norm.LAYER, activation=Activation.GELU_NEW,
        transposed=True, tables=(-1, -1))),
    "transposed": design(BIASES, form=dict(transposed=True)),
    "mixtral": design(sparse=(0, 1), form=dict(top_k=2, normalised=True, wide_experts=True)),
    "qwen-experts": design(BIASES, HEAD_NORMS, sparse=(1,), has_shared=True, form=dict(top_k=3)),
    "one-expert": design(sparse=(0,), form=dict(top_k=1, normalised=True)),
    "all-experts": design(OUTPUT_NORMS, absent=("up",), sparse=(0, 1), has_shared=True,
        form=dict(top_k=EXPERTS, activation=Activation.GELU)),
}  # fmt: skip


def random_case(dtype, name="qwen", *, windows=(0, 4), seed=0, hidden=HIDDEN, inner=INNER):
    rng, built = generator(seed), DESIGNS[name]

    def random(*size, scale=1.0):
        return (torch.randn(*size, generator=rng) * scale).to(dtype)

    rows, queries, keys = len(PREFIXES), HEADS * HEAD_DIM, built.kv_heads * HEAD_DIM
    outs = {"query": queries, "key": keys, "value": keys, "gate": inner, "up": inner}
    sizes = {
        **{each: (count, hidden) for each, count in outs.items()},
        **{"output": (hidden, queries), "down": (hidden, inner)},
        "query_norm": (queries if built.wide_norms else HEAD_DIM,),
        "key_norm": (keys if built.wide_norms else HEAD_DIM,),
        "router": (EXPERTS, hidden),
        "experts_gate": (EXPERTS, 2 * EXPERT_INNER, hidden),
        "experts_down": (EXPERTS, hidden, EXPERT_INNER),
        "shared_gate": (1, hidden),
    }
    if "key" in built.absent:
        sizes["query"] = (queries + 2 * keys, hidden)
    if "up" in built.absent:
        sizes["gate"] = (2 * inner, hidden)
    weights = []
    for layer in range(LAYERS):
        for each in LAYER_TENSORS:
            size = sizes.get(each) or (sizes.get(each.removesuffix("_bias"), (hidden,))[0],)
            size = size[::-1] if built.form.transposed else size
            given = built.has(layer, each)
            weights.append(random(*size, scale=size[-1] ** -0.5) if given else random(0))
    weights.append(random(hidden))
    weights.append(random(hidden if built.form.norm == Norm.LAYER else 0))
    nodes = len(PARENTS)

    def rotation():
        table = torch.randn(rows, nodes, built.rotary, generator=rng)
        return table if built.wide_rotations else table.to(dtype)

    slots = START + nodes + 2
    caches = [torch.full((rows, built.kv_heads, slots, HEAD_DIM), torch.nan) for _ in range(4)]
    for cache in caches:
        for row, (first, length) in enumerate(PREFIXES):
            cache[row, :, first : first + length] = random(built.kv_heads, length, HEAD_DIM).float()
    parents = torch.tensor([PARENTS] * rows)
    starts, lengths = torch.tensor(PREFIXES).T.contiguous()
    return {
        "input": random(rows, nodes, hidden),
        "cosines": [rotation() for _ in range(built.rotations)],
        "sines": [rotation() for _ in range(built.rotations)],
        "weights": weights,
        "caches": [cache.to(dtype) for cache in caches],
        "windows": list(windows),
        "ancestors": ops.tree_mask(parents, lengths).ancestors,
        "prefix_starts": starts,
        "prefix_lengths": lengths,
        "start": START,
        "head_dim": HEAD_DIM,
        "eps": 1e-5,
        "scale": HEAD_DIM**-0.5,
        "form": built.form,
    }


def with_codes(case, names=LAYER_MATRICES):
    """Half of the layers' matrices ``names`` as codes of 8 bits, the others of 4 bits, in groups."""
    rng, weights, scales = generator(2), list(case["weights"]), []
    for layer in range(LAYERS):
        for i, name in enumerate(LAYER_MATRICES):
            index = layer * len(LAYER_TENSORS) + LAYER_TENSORS.index(name)
            if name not in names or not weights[index].numel():
                scales.append(torch.empty(0))
                continue
            outs, ins = weights[index].shape[:: -1 if case["form"].transposed else 1]
            bits = 8 if i % 2 else 4
            lowest, highest = (-128, 128) if bits == 8 else (0, 16)
            codes = torch.randint(lowest, highest, (outs, ins), generator=rng)
            size = torch.rand(outs, 1, generator=rng) / highest / ins**0.5
            quantised = QuantisedWeight.pack(codes, size, bits=bits)
            weights[index] = quantised.codes
            scales.append(quantised.scales)
    return {**case, "weights": weights, "scales": scales}


def prompt_case(dtype, columns, name="qwen"):
    """The columns of prompts behind cached text, of which the last row's begins with two of padding."""
    case = random_case(dtype, name)
    rng, rows = generator(1), len(PREFIXES)

    def wider(tensor):
        random = torch.randn(rows, columns, tensor.shape[-1], generator=rng)
        return random.to(tensor.dtype)

    case["input"] = wider(case["input"])
    for each in ("cosines", "sines"):
        case[each] = [wider(table) for table in case[each]]
    for i, cache in enumerate(case["caches"]):
        longer = cache.new_full((rows, cache.shape[1], START + columns, HEAD_DIM), torch.nan)
        longer[:, :, :START] = cache[:, :, :START]
        longer[1, :, :4] = longer[2] = torch.nan  # no text
        case["caches"][i] = longer
    starts = torch.tensor([0, 4, START + 2])
    return {**case, "ancestors": None, "prefix_starts": starts, "prefix_lengths": START - starts}


def copied(case, dtype=None):
    def copy(value):
        if isinstance(value, list):
            return [copy(each) for each in value]
        if isinstance(value, torch.Tensor):
            return value.to(dtype or value.dtype, copy=True) if value.is_floating_point() else value
        return value

    return {name: copy(value) for name, value in case.items()}


def part_of(case, rows, columns=slice(None)):
    """These rows and columns of what the op reads for each node."""

    def cut(value):
        if isinstance(value, list):
            return [cut(each) for each in value]
        return value[rows, columns].contiguous()

    return {name: cut(case[name]) for name in ("input", "cosines", "sines")}


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_accurate_as_torch(dtype, name):
    case = random_case(dtype, name)
    exact, plain, ours = copied(case, torch.float64), copied(case), copied(case)
    results = [(*reference(**exact), *exact["caches"]), (*reference(**plain), *plain["caches"])]
    results.append((*ops.decoder_layers(**ours), *ours["caches"]))
    for wanted, torchs, actual in zip(*results, strict=True):
        assert actual.dtype == dtype and actual.shape == wanted.shape
        assert torch.equal(actual.isnan(), wanted.isnan())  # unwritten slots keep their NaN
        wanted, torchs, actual = (x.double().nan_to_num() for x in (wanted, torchs, actual))
        unit = torch.finfo(dtype).eps * wanted.abs().max()
        error, allowed = (actual - wanted).abs().max(), (torchs - wanted).abs().max()
        assert error <= 2 * allowed + unit


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_node_has_the_bits_of_plain_decoding(dtype, name):
    case = random_case(dtype, name)
    tree = copied(case)
    scored = ops.decoder_layers(**tree).output
    for row, (first, length) in enumerate(PREFIXES):
        alone = copied(case)
        alone["caches"] = [cache[row : row + 1] for cache in alone["caches"]]
        for depth, node in enumerate([0, 1, 3, 4]):  # the path to the last node, token by token
            start = START + depth
            # The tokens so far fill consecutive slots.
            moved = [torch.full_like(cache, torch.nan) for cache in alone["caches"]]
            for new, old in zip(moved, alone["caches"], strict=True):
                begin = START - length
                source = begin if depth else first
                new[:, :, begin : begin + length] = old[:, :, source : source + length]
                new[:, :, START:start] = old[:, :, START:start]
            alone["caches"] = moved
            step = {
                **alone,
                **part_of(case, slice(row, row + 1), slice(node, node + 1)),
                "ancestors": torch.ones(1, 1, 1, dtype=torch.long),
                "prefix_starts": torch.tensor([START - length]),
                "prefix_lengths": torch.tensor([length + depth]),
                "start": start,
            }
            single = ops.decoder_layers(**step).output[0, 0]
            assert torch.isfinite(single).all() and torch.equal(single, scored[row, node])


@pytest.mark.parametrize(
    ("name", "columns"),
    [*((name, 40) for name in DESIGNS), ("qwen", 1), ("qwen", 3), ("qwen", 300)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_are_as_accurate_as_torch(dtype, name, columns):
    case = prompt_case(dtype, columns, name)
    exact, plain, ours = copied(case, torch.float64), copied(case), copied(case)
    wanted, torchs = reference(**exact)[0], reference(**plain)[0]
    actual = ops.decoder_layers(**ours).states
    for row, padding in ((0, 0), (1, 0), (2, 2)):
        real, theirs, mine = (x[:, row, padding:].double() for x in (wanted, torchs, actual))
        if real.numel():
            unit = torch.finfo(dtype).eps * real.abs().max()
            assert (mine - real).abs().max() <= 2 * (theirs - real).abs().max() + unit


@pytest.fixture(params=[HEAD_DIM, 32], ids=["odd", "paired"])
def head_dims(request, monkeypatch):
    """Heads of 6 dimensions and of 32, whose attention in bfloat16 uses matrix units where there are some."""
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", request.param)


@pytest.mark.parametrize(
    ("name", "parts"),
    [*((name, (13, 14, 13)) for name in DESIGNS), ("qwen", (1, 39)), ("qwen", (32, 8))],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("head_dims")
def test_a_prompt_has_the_same_bits_in_any_parts(dtype, name, parts):
    case = prompt_case(dtype, sum(parts), name)
    whole = copied(case)
    expected = ops.decoder_layers(**whole).states
    begin, found = 0, []
    for part in parts:
        pieces = part_of(case, slice(None), slice(begin, begin + part))
        start = START + begin
        lengths = {"start": start, "prefix_lengths": start - case["prefix_starts"]}
        found.append(ops.decoder_layers(**{**case, **pieces, **lengths}).states)
        begin += part
    text = torch.ones(expected.shape[:3], dtype=torch.bool)
    text[:, 2, :2] = False  # padding
    assert torch.equal(torch.cat(found, dim=2)[text], expected[text])
    for ours, theirs in zip(case["caches"], whole["caches"], strict=True):
        for row, first in enumerate(case["prefix_starts"].tolist()):
            assert torch.equal(ours[row, :, first:], theirs[row, :, first:])


@pytest.mark.parametrize("outputs", [1, 5, 39, 40])
@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_last_outputs_of_a_prompt_have_the_bits_of_all(dtype, name, outputs):
    case = prompt_case(dtype, 40, name)
    whole = copied(case)
    all_states, expected = ops.decoder_layers(**whole)
    states, output = ops.decoder_layers(**case, outputs=outputs)
    assert len(states) == LAYERS - (outputs < 40)
    text = torch.ones(states.shape[1:3], dtype=torch.bool)
    text[2, :2] = False  # padding
    assert torch.equal(states[:, text], all_states[: len(states), text])
    needed = text[:, -outputs:]
    assert torch.equal(output[needed], expected[:, -outputs:][needed])
    all_states, expected = reference(**copied(case))
    states, output = reference(**copied(case), outputs=outputs)
    assert torch.equal(states, all_states[: LAYERS - (outputs < 40)])
    assert torch.equal(output, expected[:, -outputs:])
    for ours, theirs in zip(case["caches"], whole["caches"], strict=True):
        for row, first in enumerate(case["prefix_starts"].tolist()):
            assert torch.equal(ours[row, :, first:], theirs[row, :, first:])


def test_the_only_layer_may_compute_the_last_outputs():
    case = prompt_case(torch.float32, 7)
    of_layer = len(LAYER_TENSORS)
    case.update(weights=[*case["weights"][:of_layer], *case["weights"][-2:]], windows=[0])
    case["caches"] = case["caches"][:2]
    expected = ops.decoder_layers(**copied(case)).output
    states, output = ops.decoder_layers(**case, outputs=2)
    assert len(states) == 0 and torch.equal(output, expected[:, -2:])


@pytest.mark.parametrize(
    ("make", "outputs", "message"),
    [
        (random_case, 5, "outputs is for prompts, without ancestors"),
        (lambda dtype: prompt_case(dtype, 7), 0, "outputs must be 1 to the number of nodes, 7, got 0"),
        (lambda dtype: prompt_case(dtype, 7), 8, "outputs must be 1 to .* 7, got 8"),
    ],
    ids=["tree", "none", "too many"],
)  # fmt: skip
def test_rejects_outputs(make, outputs, message):
    with pytest.raises(ValueError, match=message):
        ops.decoder_layers(**make(torch.float32), outputs=outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("head_dims")
def test_a_row_of_a_prompt_does_not_depend_on_the_others(dtype):
    """Nor on NaN in the padding before it."""
    case = prompt_case(dtype, 40)
    case["input"][2, :2] = torch.nan
    together = ops.decoder_layers(**copied(case)).states
    for row in range(len(PREFIXES)):
        alone = copied(case)
        alone.update(part_of(alone, slice(row, row + 1)))
        for name in ("prefix_starts", "prefix_lengths"):
            alone[name] = alone[name][row : row + 1]
        alone["caches"] = [cache[row : row + 1] for cache in alone["caches"]]
        first = 2 if row == 2 else 0
        states = ops.decoder_layers(**alone).states[:, 0, first:]
        assert torch.isfinite(states).all()
        assert torch.equal(states, together[:, row, first:])


def gelu_new(x):
    """As transformers writes it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (Activation.SILU, F.silu),
        (Activation.GELU, F.gelu),
        (Activation.GELU_TANH, partial(F.gelu, approximate="tanh")),
        (Activation.GELU_NEW, gelu_new),
    ],
    ids=["silu", "gelu", "gelu-tanh", "gelu-new"],
)
def test_activations_of_all_bfloat16(activation, function):
    """Rounding elsewhere changes thousands; torch's exponential and tanh differ from ours for a few.

    Where torch's result is not the nearest number to the exact one, ours may be that. Subnormal numbers are
    left out on processors where their products are zero.
    """
    numbers = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)
    x = numbers[numbers.isfinite()].view(-1, 255)
    zeros = x.new_zeros(2, 2)
    weights = {name: zeros for name in ("query", "key", "value", "output")}
    weights |= {"up": x.new_tensor([[1, 0]]), "down": x.new_tensor([[0], [1]])}
    form = DecoderForm(tensors=tuple(weights), activation=activation, tables=(-1,))
    starts = torch.zeros(len(x), dtype=torch.long)
    states = ops.decoder_layers(
        torch.stack([x, torch.zeros_like(x)], dim=-1),
        [],
        [],
        [*weights.values(), x.new_ones(2), x.new_empty(0)],
        [x.new_zeros(len(x), 1, 255, 2) for _ in range(2)],
        [0],
        None,
        starts,
        starts,
        0,
        2,
        1e-5,
        1.0,
        form=form,
    ).states
    ours, torchs, nearest = states[0, ..., 1], function(x), function(x.double()).to(x.dtype)
    tiny = torch.finfo(x.dtype).tiny
    differs = (ours != torchs) & (ours != nearest)
    if ops.linear(x.new_full((1, 1), tiny / 2), x.new_ones(1, 1)) == 0:
        differs &= (x.abs() >= tiny) & (torchs.abs() >= tiny)
    assert differs.sum() < 50


def with_exact_products(case):
    """The same layers with matrices that only pick inputs."""
    for i, tensor in enumerate(case["weights"]):
        if tensor.ndim > 1:
            eye, outs = torch.zeros_like(tensor), torch.arange(tensor.shape[-2])
            eye[..., outs, outs % tensor.shape[-1]] = 1.0
            case["weights"][i] = eye
    return case


@pytest.mark.parametrize("poisoned", [False, True], ids=["", "poisoned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("head_dims")
def test_attention_of_a_prompt_has_the_bits_of_a_tree(dtype, poisoned):
    """The products of both have orders of their own, so they are of one weight here.

    Infinities in a token have no effect on those before it.
    """
    case = with_exact_products(prompt_case(dtype, 40, "llama"))
    row = slice(0, 1)
    case.update(part_of(case, row))
    for name in ("prefix_starts", "prefix_lengths"):
        case[name] = case[name][row]
    case["caches"] = [cache[row] for cache in case["caches"]]
    chain = copied(case)
    parents = torch.arange(-1, 39)[None]
    chain["ancestors"] = ops.tree_mask(parents, chain["prefix_lengths"]).ancestors
    if poisoned:
        clean = ops.decoder_layers(**copied(case)).states
        case["input"][0, 20] = chain["input"][0, 20] = torch.inf
    expected = ops.decoder_layers(**chain).states
    actual = ops.decoder_layers(**case).states
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    if poisoned:
        assert torch.equal(actual[:, :, :20], clean[:, :, :20])
        assert actual[-1, :, 20:].isnan().any(-1).all()


@pytest.mark.parametrize(
    "names", [LAYER_MATRICES, ("key", "gate", "down")], ids=["all", "some matrices"]
)
@pytest.mark.parametrize(
    "make", [random_case, lambda *args: prompt_case(args[0], 40, args[1])], ids=["tree", "prompt"]
)
@pytest.mark.parametrize("name", ["qwen", "joined-biases", "neox", "gpt2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_as_accurate_as_torch(dtype, name, make, names):
    case = with_codes(make(dtype, name), names)
    exact, plain, ours = copied(case, torch.float64), copied(case), copied(case)
    exact["scales"] = case["scales"]
    padded = -1 if case["ancestors"] is None else len(PREFIXES)  # this row begins with padding
    wanted, torchs = reference(**exact)[0][:, :padded], reference(**plain)[0][:, :padded]
    actual = ops.decoder_layers(**ours).states[:, :padded].double()
    unit = torch.finfo(dtype).eps * wanted.abs().max()
    assert (actual - wanted).abs().max() <= 2 * (torchs.double() - wanted).abs().max() + unit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_node_does_not_depend_on_the_others_with_codes(dtype):
    case = with_codes(random_case(dtype))
    together = ops.decoder_layers(**copied(case)).output
    for row in range(len(PREFIXES)):
        alone = copied(case)
        alone.update(part_of(alone, slice(row, row + 1)))
        for name in ("ancestors", "prefix_starts", "prefix_lengths"):
            alone[name] = alone[name][row : row + 1]
        alone["caches"] = [cache[row : row + 1] for cache in alone["caches"]]
        assert torch.equal(ops.decoder_layers(**alone).output[0], together[row])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["scales"].pop(), "scales must be empty, or 8 tensors for each of 2 layers, got 15"),
        (lambda c: c["scales"].__setitem__(3, torch.ones(5, 1)), r"argument scales\[3\] must be contiguous"),
        (lambda c: c["weights"].__setitem__(2, torch.zeros(24, 20)), r"weights\[2\] with scales must be"),
        (lambda c: c["weights"].__setitem__(10, torch.zeros(20, 5, dtype=torch.int8)),
            r"weights\[10\] must be \[outs, ins\] = \[20, 24\], got shape \[20, 5\]"),
        (lambda c: c.__setitem__("levels", torch.zeros(3)), r"levels must be \[16\]"),
    ],
)  # fmt: skip
def test_rejects_codes_that_do_not_fit(change, message):
    case = with_codes(random_case(torch.float32))
    change(case)
    with pytest.raises(ValueError, match=message):
        ops.decoder_layers(**case)


def test_rows_may_share_their_rotations():
    case = random_case(torch.float32, "gemma")
    first = {name: [table[:1] for table in case[name]] for name in ("cosines", "sines")}
    shared = {**copied(case), **first}
    for name, tables in first.items():
        case[name] = [table.expand(3, -1, -1).contiguous() for table in tables]
    expected = ops.decoder_layers(**copied(case)).states
    assert torch.equal(ops.decoder_layers(**shared).states, expected)


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_the_result(dtype, name):
    case = random_case(dtype, name, hidden=160, inner=500)  # more than one thread's worth
    expected = ops.decoder_layers(**copied(case))
    with two_threads():
        for _ in range(10):
            for given, alone in zip(ops.decoder_layers(**copied(case)), expected, strict=True):
                assert torch.equal(given, alone)


@pytest.mark.parametrize(
    ("make", "outputs"),
    [
        (random_case, None),
        (lambda dtype: prompt_case(dtype, 7), None),
        (lambda dtype: prompt_case(dtype, 7), 2),
    ],
    ids=["tree", "prompt", "last outputs"],
)
def test_opcheck(make, outputs):
    case = make(torch.float32)
    case["caches"] = [cache.nan_to_num() for cache in case["caches"]]
    form = case.pop("form").native
    torch.library.opcheck(
        torch.ops.specdec.decoder_layers.default,
        (*case.values(), [], None, outputs, *form),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(3, 5, HIDDEN).double()}, "input must be torch.float32 or"),
        ({"input": torch.zeros(3, HIDDEN)}, r"input must be \[batch, nodes, hidden\]"),
        ({"cosines": [torch.zeros(2, 5, HEAD_DIM)]}, "cosines must be .* = .3, 5, 6."),
        ({"cosines": [torch.zeros(3, 5, 5)]}, "cosines must have an even number .* 2 to 6, got 5"),
        ({"cosines": [torch.zeros(3, 5, 8)]}, "cosines must have an even number .* 2 to 6, got 8"),
        ({"sines": [torch.zeros(3, 5, HEAD_DIM).double()]}, "sines must be torch.float32"),
        ({"cosines": []}, "sines must have as many tables as cosines, got 1 and 0"),
        ({"sines": [torch.zeros(5, 3, 6).transpose(0, 1)]}, "sines must be contiguous"),
        ({"windows": [0]}, "weights must be 27 tensors for each of the layers"),
        ({"windows": [0, -1]}, "windows must be 0"),
        ({"head_dim": 0}, "head_dim must be 1 or more"),
        ({"head_dim": 10}, "whole heads of 10"),
        (
            {"form": DecoderForm(tables=(0,))},
            "tables must be empty or have one .* got 1 for 2",
        ),
        ({"form": DecoderForm(tables=(0, 1))}, r"tables must be -1 \(none\) to 0, got 1"),
        ({"form": DecoderForm(tables=(-2, 0))}, "tables must be .* got -2"),
        ({"form": DecoderForm(norm=4)}, "norm must be 0 to 3, got 4"),
        ({"form": DecoderForm(activation=-1)}, "activation must be 0 to 3, got -1"),
        ({"form": DecoderForm(softcap=-1.0)}, "softcap must be finite and 0 or more"),
        ({"form": DecoderForm(residual_scale=torch.inf)}, "residual_scale must be finite"),
        ({"form": DecoderForm(interleaved=True)}, "interleaved needs one matrix .* in several"),
        ({"form": DecoderForm(parallel=True, residual_scale=0.5)}, "parallel does not go with"),
        ({"start": 30}, r"caches\[0\] must be .*35 slots or more"),
        ({"start": -1}, "start must be 0 to"),
        ({"start": 2**63 - 1}, "start must be 0 to"),
        ({"input": torch.zeros(3, 5, 0)}, "input must have 1 or more numbers per node"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"prefix_starts": torch.tensor([0, 40, 2])}, "slot"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rejects(changes, message):
    case = random_case(torch.float32)
    before = copied(case)
    with pytest.raises(ValueError, match=message):
        ops.decoder_layers(**{**case, **changes})
    for cache, untouched in zip(case["caches"], before["caches"], strict=True):
        assert torch.equal(cache.nan_to_num(), untouched.nan_to_num())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix_lengths": torch.tensor([9, 5, 0])},
            "prefix_lengths must be start - prefix_starts without ancestors, got 0 in row 2"),
        ({"prefix_starts": torch.tensor([-1, 4, 11]), "prefix_lengths": torch.tensor([10, 5, -2])},
            "got 10 in row 0 for start 9 and prefix_starts -1"),
        ({"prefix_starts": torch.tensor([0, 4, 2**62]), "prefix_lengths": torch.tensor([9, 5, 9 - 2**62])},
            "in row 2 for start 9"),
    ],
)  # fmt: skip
def test_rejects_prompts_that_do_not_follow_their_text(changes, message):
    case = prompt_case(torch.float32, 7)
    with pytest.raises(ValueError, match=message):
        ops.decoder_layers(**{**case, **changes})


@pytest.mark.parametrize("index", [0, 2, 3, 8, 20, 54])
def test_rejects_a_weight_that_does_not_fit(index):
    case = random_case(torch.float32)
    case["weights"][index] = case["weights"][index].double()
    with pytest.raises(ValueError, match=rf"weights\[{index}\] must be .* of torch.float32"):
        ops.decoder_layers(**case)


@pytest.mark.parametrize(
    ("design", "name", "weight", "message"),
    [
        ("llama", "attention_norm_bias", torch.zeros(HIDDEN), "an RMS norm has no bias"),
        ("phi", "key", torch.zeros(INNER, HIDDEN), "the first layer has no such matrix"),
        ("starcoder", "gate_bias", torch.zeros(INNER), "there is no matrix that it belongs to"),
    ],
)
def test_rejects_weights_that_a_layer_does_not_have(design, name, weight, message):
    case = random_case(torch.float32, design)
    index = len(LAYER_TENSORS) + LAYER_TENSORS.index(name)  # of the second layer
    case["weights"][index] = weight
    with pytest.raises(ValueError, match=rf"weights\[{index}\] must be empty \({message}\)"):
        ops.decoder_layers(**case)


@pytest.mark.parametrize(
    ("design", "name", "weight", "message"),
    [
        ("phi", "gate", torch.zeros(2 * INNER + 1, HIDDEN), "gates and ups of the same size"),
        ("phi", "up", torch.zeros(INNER, HIDDEN), r"weights\[15\] must be \[28, 20\] with a contiguous"),
        ("phi", "query", torch.zeros(2 * KV_HEADS * HEAD_DIM, HIDDEN), "whole heads of 6"),
        ("neox", "query", torch.zeros(96, HIDDEN), "interleaved needs one matrix .* in one matrix"),
        ("neox", "query_norm", torch.zeros(HEADS * HEAD_DIM), "norms of single heads, if interleaved"),
        ("neox", "mlp_output_norm", torch.zeros(HIDDEN), "parallel does not go with"),
        ("olmo", "key_norm", torch.zeros(HEAD_DIM), r"contiguous \[12\]"),
        ("gpt2", "query", torch.zeros(3 * HEADS * HEAD_DIM, HIDDEN), "whole heads of 6"),
        ("gpt2", "up", torch.zeros(HIDDEN, 0), r"must be \[ins, outs\], got shape \[20, 0\]"),
        ("gpt2", "down", torch.zeros(HIDDEN, INNER), r"must be \[28, 20\] with a contiguous last"),
        ("gpt2", "output", torch.zeros(HIDDEN, HEADS * HEAD_DIM).T, r"must be \[24, 20\] with a contiguous"),
    ],
)  # fmt: skip
def test_rejects_a_design_that_does_not_fit(design, name, weight, message):
    case = random_case(torch.float32, design)
    case["weights"][LAYER_TENSORS.index(name)] = weight
    with pytest.raises(ValueError, match=message):
        ops.decoder_layers(**case)


@pytest.mark.parametrize("name", DESIGNS)
def test_absent_tensors_may_be_left_out(name):
    case = random_case(torch.float32, name)
    count = len(LAYER_TENSORS)
    layers = [case["weights"][first : first + count] for first in (0, count)]
    present = [i for i in range(count) if any(own[i].numel() for own in layers)][::-1]  # any order
    shorter = copied(case)
    shorter["weights"] = [own[i] for own in layers for i in present] + case["weights"][-2:]
    tensors = tuple(LAYER_TENSORS[i] for i in present)
    shorter["form"] = replace(case["form"], tensors=tensors)
    again = copied(shorter)
    expected = ops.decoder_layers(**case).states
    assert torch.equal(ops.decoder_layers(**shorter).states, expected)
    torch.testing.assert_close(reference(**again)[0], expected, rtol=1e-4, atol=1e-4)


def at(name, layer=LAYERS - 1):
    return layer * len(LAYER_TENSORS) + LAYER_TENSORS.index(name)


@pytest.mark.parametrize("name", ["qwen-experts", "mixtral", "all-experts"])
def test_only_the_chosen_experts_are_read(name):
    """NaN in an expert reaches the nodes that choose it, as many as ``top_k``, and no other bit."""
    case = random_case(torch.float32, name)
    expected = ops.decoder_layers(**copied(case)).output
    choices = torch.zeros(expected.shape[:2])
    for expert in range(EXPERTS):
        poisoned = copied(case)
        for each in OF_EXPERTS[1:]:
            poisoned["weights"][at(each)][expert] = torch.nan
        output = ops.decoder_layers(**poisoned).output
        chosen = output.isnan().all(-1)
        assert torch.equal(output[~chosen], expected[~chosen])
        choices += chosen
    assert (choices == case["form"].top_k).all()


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 3), (5, 2), (33, 8), (130, 2)])
def test_ties_go_to_the_experts_that_torch_takes(experts, top_k):
    """Half of the experts have equal logits, the other half have others."""
    case, rng = random_case(torch.float32, "one-expert"), generator(3)
    case["form"] = replace(case["form"], top_k=top_k)
    router = torch.randn(experts, HIDDEN, generator=rng)
    router[: (experts + 1) // 2] = 0
    sizes = {"experts_gate": (2 * EXPERT_INNER, HIDDEN), "experts_down": (HIDDEN, EXPERT_INNER)}
    case["weights"][at("router", 0)] = router[torch.randperm(experts, generator=rng)]
    for each, size in sizes.items():
        case["weights"][at(each, 0)] = torch.randn(experts, *size, generator=rng)
    expected = reference(**copied(case))[1]
    output = ops.decoder_layers(**copied(case)).output
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [random_case, lambda *args: prompt_case(args[0], 40, args[1])],
    ids=["tree", "prompt"])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_node_of_nan_keeps_its_experts_to_itself(dtype, make):
    case = make(dtype, "qwen-experts")
    expected = ops.decoder_layers(**copied(case)).output
    case["input"][1] = torch.nan
    output = ops.decoder_layers(**case).output
    assert output[1].isnan().all()
    assert torch.equal(output[0], expected[0])


def test_experts_may_be_parts_of_larger_tensors():
    case = random_case(torch.float32, "qwen-experts")
    expected = ops.decoder_layers(**copied(case)).output
    for each in OF_EXPERTS:
        weight = case["weights"][at(each)]
        larger = weight.new_full([size + 3 for size in weight.shape], torch.nan)
        part = larger[tuple(slice(1, size + 1) for size in weight.shape)]
        case["weights"][at(each)] = part.copy_(weight)
    assert torch.equal(ops.decoder_layers(**case).output, expected)


@pytest.mark.parametrize(("rows", "nodes"), [(0, 5), (3, 0)])
@pytest.mark.parametrize("name", ["llama", "qwen-experts"])
def test_no_rows_or_no_columns(name, rows, nodes):
    case = prompt_case(torch.float32, nodes, name)
    case.update(part_of(case, slice(rows)))
    for each in ("prefix_starts", "prefix_lengths"):
        case[each] = case[each][:rows]
    case["caches"] = [cache[:rows] for cache in case["caches"]]
    states, output = ops.decoder_layers(**case)
    assert states.shape == (LAYERS, rows, nodes, HIDDEN) and output.shape == states.shape[1:]


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("router", torch.zeros(EXPERTS), r"must be \[outs, ins\], got shape \[5\]"),
        ("router", torch.zeros(EXPERTS, HIDDEN + 1), r"must be \[5, 20\] with a contiguous"),
        ("router", torch.zeros(HIDDEN, EXPERTS).T, r"must be \[5, 20\] with a contiguous"),
        ("router", torch.zeros(EXPERTS, HIDDEN).double(), "must be .* of torch.float32 on the CPU, got"),
        ("router", torch.zeros(0), r"must be empty \(the layer has no router\)"),
        ("experts_gate", torch.zeros(EXPERTS, 18), r"must be \[experts, 2 \* inner, hidden\]"),
        ("experts_gate", torch.zeros(EXPERTS, 9, HIDDEN), r"must be \[experts, 2 \* inner, hidden\]"),
        ("experts_gate", torch.zeros(EXPERTS - 1, 18, HIDDEN), r"must be \[5, 18, 20\] with"),
        ("experts_gate", torch.zeros(0), r"must be \[experts, 2 \* inner, hidden\], got shape \[0\]"),
        ("experts_down", torch.zeros(EXPERTS, HIDDEN, 18), r"must be \[5, 20, 9\] with"),
        ("experts_down", torch.zeros(EXPERTS, 9, HIDDEN).mT, r"must be \[5, 20, 9\] with"),
        ("shared_gate", torch.zeros(2, HIDDEN), r"must be \[1, 20\] with"),
        ("shared_gate", torch.zeros(0), r"must be \[1, 20\] with a contiguous last dimension"),
        ("shared_gate_bias", torch.zeros(2), r"must be contiguous \[1\]"),
        ("down", torch.zeros(0), r"must be \[20, 28\] with"),
        ("gate", torch.zeros(INNER + 1, HIDDEN), r"must be \[28, 20\] with"),
    ],
)  # fmt: skip
def test_rejects_experts_that_do_not_fit(name, weight, message):
    case = random_case(torch.float32, "qwen-experts")
    case["weights"][at(name)] = weight
    index = at("experts_gate" if "no router" in message else name)
    with pytest.raises(ValueError, match=rf"weights\[{index}\] {message}"):
        ops.decoder_layers(**case)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shared_gate", "there is no shared expert"),
        ("shared_gate_bias", "there is no matrix that it belongs to"),
        ("gate_bias", "there is no matrix that it belongs to"),
    ],
)
def test_rejects_parts_of_a_shared_expert_alone(name, message):
    case = random_case(torch.float32, "mixtral")
    case["weights"][at(name)] = torch.zeros(1, HIDDEN)
    with pytest.raises(ValueError, match=rf"weights\[{at(name)}\] must be empty \({message}\)"):
        ops.decoder_layers(**case)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"top_k": 0}, "top_k must be 1 to the number of experts, 5, got 0"),
        ({"top_k": EXPERTS + 1}, "top_k must be 1 to the number of experts, 5, got 6"),
    ],
    ids=str,
)
def test_rejects_forms_of_experts(form, message):
    case = random_case(torch.float32, "mixtral")
    case["form"] = replace(case["form"], **form)
    with pytest.raises(ValueError, match=message):
        ops.decoder_layers(**case)


def test_rejects_experts_of_transposed_matrices():
    case = random_case(torch.float32, "transposed")
    case["weights"][at("router")] = torch.zeros(EXPERTS, HIDDEN)
    with pytest.raises(ValueError, match="transposed does not go with a router"):
        ops.decoder_layers(**case)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (LAYER_TENSORS[:-1], "weights must be 26 tensors for each of the layers"),
        ((*LAYER_TENSORS[:-1], "query"), r"tensors must be different numbers below 27, got \[0, 1"),
    ],
)
def test_rejects_tensors_that_do_not_fit(tensors, message):
    case = random_case(torch.float32)
    case["form"] = replace(case["form"], tensors=tensors)
    with pytest.raises(ValueError, match=message):
        ops.decoder_layers(**case)


@pytest.mark.parametrize("name", ["query", "output", "down"])
def test_rejects_layers_without_a_matrix(name):
    case = random_case(torch.float32)
    index = LAYER_TENSORS.index(name)
    tensors = tuple(each for each in LAYER_TENSORS if each != name)
    case["form"] = replace(case["form"], tensors=tensors)
    case["weights"] = [
        each
        for i, each in enumerate(case["weights"])
        if i not in (index, index + len(LAYER_TENSORS))
    ]
    with pytest.raises(ValueError, match=f"tensors must have number {index}, which layer 0 needs"):
        ops.decoder_layers(**case)


def isa_results():
    """Of matrices that only pick inputs, because the products of the baseline have bits of their own."""
    results = []
    for name in DESIGNS:
        for dtype in DTYPES:
            for case in (
                random_case(dtype, name, hidden=77, inner=150),
                prompt_case(dtype, 9, name),
            ):
                states, output = ops.decoder_layers(**with_exact_products(case))
                written = [cache.nan_to_num() for cache in case["caches"]]
                results.append(
                    (states[:, :2], output[:2], *written)
                )  # row 2 of prompts has padding
    return results
