"""Heads for the op ``draft_head``: 8-bit weights, memory, and what the specification drafts instead."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.drafters.checkpoint_cases import head_config
from helpers.drafters.head_cases import Run, elements, head_of
from helpers.models.tiny import prompts, tiny_model

import specdec_ext
from specdec_ext import HeadDrafter, TreeConfig, ops
from specdec_ext.drafters.heads.bound_head import BoundHead
from specdec_ext.heads.weights import UnkeptTensors
from specdec_ext.ops import packed_head
from specdec_ext.ops import quantise as quantise_module
from specdec_ext.ops.draft_limits import default_weights
from specdec_ext.ops.quantise import quantise, weight_dtype

FORMATS = ["int8", "float8"]


@pytest.mark.parametrize("at_once", [1, 20, 1 << 24])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", FORMATS)
def test_quantised_weights_are_the_nearest_ones(weights, source, at_once, monkeypatch):
    """Each weight becomes the nearest number times the scale of its row; the largest one is exact."""
    monkeypatch.setattr(quantise_module, "_AT_ONCE", at_once)
    dtype = weight_dtype(weights)
    matrix = torch.randn(7, 10, generator=torch.Generator().manual_seed(0)).to(source)
    matrix *= torch.tensor([1, 1e-3, 30, 1, 1, 1, 1], dtype=source)[:, None]
    numbers, scales = quantise(matrix, dtype)
    assert numbers.dtype == dtype and numbers.shape == matrix.shape
    assert scales.dtype == torch.float32 and scales.shape == (7,)
    everything = torch.arange(-127, 128).to(torch.int8)
    if weights == "float8":
        everything = torch.arange(256).to(torch.uint8).view(dtype)
        everything = everything[everything.float().isfinite()]
    levels = everything.double() * scales[:, None].double()
    best = (matrix.double()[..., None] - levels[:, None]).abs().amin(dim=2)
    ours = numbers.double() * scales[:, None].double()
    torch.testing.assert_close((matrix.double() - ours).abs(), best, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(ours.abs().amax(1), matrix.double().abs().amax(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("weights", FORMATS)
def test_worked_example(weights):
    matrix = torch.tensor([[127.0, -127.0, 0.4, 63.6], [0, 0, 0, 0]])
    largest = 448 if weights == "float8" else 127
    numbers, scales = quantise(matrix * (largest / 127), weight_dtype(weights))
    assert scales.tolist() == [1, 1]
    expected = [127, -127, 0, 64] if weights == "int8" else [448, -448, 1.375, 224]
    assert numbers.float().tolist() == [expected, [0, 0, 0, 0]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("weights", FORMATS)
def test_row_with_an_infinite_or_nan_weight_has_no_finite_product(weights, value):
    """Other rows are not affected."""
    matrix = torch.tensor([[1.0, value, -2], [1, 2, 3]])
    numbers, scales = quantise(matrix, weight_dtype(weights))
    products = numbers.float() @ torch.tensor([1.0, 1, 1]) * scales
    assert not products[0].isfinite() and products[1].isfinite()
    assert numbers.float().isfinite().all()


@pytest.mark.parametrize("kind", ["eagle1-two-layers", "no-fc"])
def test_only_matrices_get_8_bits_and_scales(kind, monkeypatch):
    """The matrices are lm_head, fc and four of each layer."""
    monkeypatch.setattr(packed_head, "reads_panels", lambda _: False)
    monkeypatch.setattr(packed_head, "_in_tiles", lambda weight, is_paired: weight)
    head = head_of(kind)
    run = Run.start(head, 1)
    same = ops.PackedHead.pack(head, run.embedding, run.lm_head)
    packed = ops.PackedHead.pack(head, run.embedding, run.lm_head, "int8")
    layers = head.config.num_layers
    matrices = [1, 5] if head.config.has_fc else [1]
    matrices += [11 + 10 * layer + i for layer in range(layers) for i in (1, 5, 8, 9)]
    changed = [packed.weights[i].dtype == torch.int8 for i in range(len(same.weights))]
    assert [i for i, is_int8 in enumerate(changed) if is_int8] == matrices
    scales = packed.weights[len(same.weights) :]
    assert len(scales) == 2 + 4 * layers
    expected = [len(tensor) for i, tensor in enumerate(packed.weights) if i in matrices]
    assert [len(scale) for scale in scales if len(scale)] == expected
    for i, tensor in enumerate(same.weights):
        if i not in matrices:
            assert packed.weights[i] is tensor or torch.equal(packed.weights[i], tensor)
    for index, scale in zip(matrices, filter(len, scales), strict=True):
        numbers, expected_scale = quantise(same.weights[index], torch.int8)
        assert torch.equal(packed.weights[index], numbers) and torch.equal(scale, expected_scale)


def test_num_bytes_counts_shared_tensors_once(monkeypatch):
    """The embedding is also lm_head. Tiles have whole units of 64 bytes and 8 outputs."""
    monkeypatch.setattr(packed_head, "reads_panels", lambda _: False)
    head = head_of("eagle1", dtype=torch.bfloat16)
    embedding = torch.zeros(97, 32, dtype=torch.bfloat16)
    tied = ops.PackedHead.pack(head, embedding, embedding)
    apart = ops.PackedHead.pack(head, embedding, embedding.clone())
    down = head.tensors["layers.0.mlp.down_proj.weight"]
    own = sum(tensor.nbytes for tensor in head.tensors.values()) + 32 * (128 - 96)
    assert down.nbytes == 32 * 96
    assert (tied.num_bytes, apart.num_bytes) == (own + 97 * 64, own + 2 * 97 * 64)
    small = ops.PackedHead.pack(head, embedding, embedding, "int8")
    # The matrices are lm_head, fc, qkv, o, gate and up, down; in 8 bits each output has a scale.
    half = 64 * (104 + 32 + 64 + 32 + 96 + 32)
    scales = 4 * (97 + 32 + 64 + 32 + 96 + 32)
    same = 32 * 128 + 64 * 64 + 32 * 64 + 96 * 64 + 32 * 128
    assert small.num_bytes == own + 97 * 64 - same + half + scales


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SIZES = dict(hidden_size=32, target_hidden_size=32, intermediate_size=48, head_dim=8)


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        (CPU, dict(tree=TreeConfig(70, 2), rows=500), None),
        (CPU, dict(hidden_size=31, dtype=torch.bfloat16), None),
        (CPU, dict(dtype=torch.float16), "on the CPU it supports torch."),
        (CPU, dict(dtype=torch.float64), "on the CPU it supports torch."),
        (CPU, dict(weights="int8"), None),
        (CPU, dict(weights="float8"), "on the CPU it supports weights of int8, not float8"),
        (torch.device("xpu"), {}, "not xpu"),
        (CUDA, dict(tree=TreeConfig(64, 1, 1024), rows=128), None),
        (CUDA, dict(dtype=torch.float16, tree=TreeConfig(2, 32)), None),
        (CUDA, dict(dtype=torch.bfloat16, tree=TreeConfig(2, 32), weights="float8"), None),
        (CUDA, dict(dtype=torch.float64), "float16, not torch.float64"),
        (CUDA, dict(tree=TreeConfig(65, num_nodes=4)), None),
        (CUDA, dict(tree=TreeConfig(choices=((32,),))), "at most 32, not 33"),
        (CUDA, dict(hidden_size=36), None),
        (CUDA, dict(hidden_size=40, dtype=torch.float16), None),
    ],
)
def test_refusals_name_the_limit(device, changes, reason):
    """``test_limits_of_cuda`` compares the sentences of CUDA's limits with the errors of the op."""
    given = dict(dtype=torch.float32, tree=TreeConfig(), rows=1, weights="same")
    config = head_config("eagle3", **SIZES | {k: changes[k] for k in changes.keys() - given.keys()})
    given |= {name: changes[name] for name in changes.keys() & given.keys()}
    refusal = ops.draft_head_refusal(config, device, *given.values())
    assert refusal is None if reason is None else reason in refusal


def test_the_specification_drafts_what_the_op_refuses():
    head = head_of("eagle3")
    model = tiny_model("llama", dtype=torch.float64)
    bound = BoundHead.bind(head, model)
    assert "torch.float64" in bound.refusal(TreeConfig(2), 1)
    run = Run.start(bound.head, 1, embedding=bound.embedding, lm_head=bound.lm_head)
    tokens, features = elements(bound.head, 1, 3)
    numbers = [torch.tensor([n]) for n in (3, 0, 0)]
    caches = run.keys.clone(), run.values.clone()
    with pytest.warns(UserWarning, match="in PyTorch, many times slower .*torch.float64"):
        given = run.cosines, run.sines, *caches, tokens, features, *numbers, tokens[:, -1]
        drafted = bound.draft(TreeConfig(2), *given)
    for ours, theirs in zip(drafted, run.draft(TreeConfig(2), tokens, features), strict=True):
        assert torch.equal(ours, theirs)


def test_unsupported_weight_formats_are_refused():
    """The specification does not draft with other weights in silence."""
    ids, _ = prompts((5,))
    drafter = HeadDrafter(head_of("eagle1"), weights="float8")
    message = r"weights='float8' needs the op draft_head.* on the CPU it supports weights of int8"
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(tiny_model("llama"), ids, drafter=drafter, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"weights='int3'; expected one of same, int8, float8"):
        HeadDrafter(head_of("eagle1"), weights="int3")


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, "int8"), (torch.bfloat16, "int8"), (torch.float64, "same")],
    ids=str,
)
def test_heads_have_8_bits_on_the_cpu_unless_the_specification_drafts(dtype, weights):
    drafter, model = HeadDrafter(head_of("eagle3")), tiny_model("llama", dtype=dtype)
    drafter.feature_layers(model)
    assert drafter._bound.weights == weights


def test_default_weights_on_cuda_are_not_rounded():
    assert default_weights(torch.device("cuda"), torch.bfloat16) == "same"


# --- memory ---------------------------------------------------------------------------------------


def counted(head):
    """The head with unkept tensors, the names of those alive, and how many were alive at each read."""
    alive, most = [], []

    def read(name):
        tensor = head.tensors[name].clone()
        alive.append(name)
        most.append(len(alive))
        weakref.finalize(tensor, alive.remove, name)
        return tensor

    return replace(head, tensors=UnkeptTensors(head.tensors, read)), alive, most


@pytest.mark.parametrize("options", [{}, {"hidden_size": 40, "intermediate_size": 72}], ids=str)
def test_unkept_tensors_are_packed_one_weight_at_a_time(options):
    """At most queries, keys and values of one layer are in memory; none stays; the bits are the same."""
    head = head_of("eagle3", **options)
    unkept, alive, most = counted(head)
    assert not alive
    del most[:]
    embedding = torch.randn(head.config.vocab_size, head.config.hidden_size)
    packed = ops.PackedHead.pack(unkept, embedding)
    assert max(most) <= 4 and not alive  # one more, for its dtype
    expected = ops.PackedHead.pack(head, embedding, head.tensors["lm_head.weight"])
    for ours, theirs in zip(packed.weights, expected.weights, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_unkept_head_drafts_the_same():
    """After the first draft only the panels are in memory; the specification keeps its own tensors."""
    head, model = head_of("eagle3"), tiny_model("llama")
    unkept, alive, _ = counted(head)
    ids, _ = prompts((6,))
    stats = []
    for each in (head, unkept):
        kwargs = dict(speculation="fixed", max_new_tokens=12, return_dict_in_generate=True)
        output = specdec_ext.generate(model, ids, drafter=HeadDrafter(each), **kwargs)
        stats.append((output.sequences.tolist(), output.speculation_stats.accepted_per_position))
    assert stats[0] == stats[1] and not alive
    double = BoundHead.bind(unkept, tiny_model("llama", dtype=torch.float64))
    assert double._in_memory[0].tensors.keys() == head.tensors.keys()


def test_conversions_to_the_targets_dtype_are_not_kept():
    """Of a head in another dtype only the packed matrices stay; the specification keeps one conversion."""
    head = head_of("eagle3", dtype=torch.bfloat16, own_embedding=True)
    bound = BoundHead.bind(head, tiny_model("llama"))
    first, second = (bound.head.tensors["fc.weight"] for _ in range(2))
    assert first.dtype == torch.float32 and first.data_ptr() != second.data_ptr()
    assert torch.equal(first, head.tensors["fc.weight"].float())
    kept, embedding, lm_head = bound._in_memory
    assert embedding is kept.tensors["embed_tokens.weight"]
    assert lm_head is kept.tensors["lm_head.weight"]
    same = BoundHead.bind(head, tiny_model("llama", dtype=torch.bfloat16))
    assert same.head.tensors["fc.weight"] is head.tensors["fc.weight"]


def test_missing_lm_head_is_refused():
    head = head_of("eagle1")
    assert not head.config.own_lm_head
    with pytest.raises(ValueError, match=r"has no lm_head of its own; pass the target"):
        ops.PackedHead.pack(head, torch.randn(head.config.vocab_size, head.config.hidden_size))


def test_streams_share_weights_but_no_sync_buffer(monkeypatch):
    """Drafters of ``"auto"`` share a bound head; one barrier would count the blocks of two streams."""
    model, streams = tiny_model("llama"), [SimpleNamespace(cuda_stream=number) for number in (1, 2)]
    bound = BoundHead.bind(head_of("eagle3"), model)
    packed = replace(bound._packed, sync=torch.zeros(256, dtype=torch.uint8))
    monkeypatch.setitem(vars(bound), "_packed", packed)  # as on CUDA
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    drafters = [HeadDrafter(head_of("eagle3")), None]
    drafters[0]._bound = bound
    drafters[1] = copy.copy(drafters[0])
    used = []
    for drafter in drafters:
        used.append(drafter._bound._on_this_stream())
        streams.reverse()
    again = [drafters[1]._bound._on_this_stream(), None]
    streams.reverse()
    again[1] = drafters[0]._bound._on_this_stream()
    assert used[0].sync.data_ptr() != used[1].sync.data_ptr()
    assert used[0].weights is used[1].weights
    assert again[0] is used[0] and again[1] is used[1]
