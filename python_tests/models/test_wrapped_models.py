"""Targets that another library has wrapped have the text of the wrapped model, or are refused.

Each case is a model as its library makes it. Greedy text is that of transformers' own ``generate`` on the
same model, with right, wrong and branched drafts, alone and in a ragged batch.
"""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys

import pytest
import torch
from helpers.models.tiny import DRAFTERS, generated, make_drafter, prompts, tiny_model
from helpers.places import ROOT, TESTS
from torch import nn

import specdec_ext
from specdec_ext import DraftModelDrafter, compare_runs
from specdec_ext.drafters import resolve_drafter
from specdec_ext.errors import NotAcceleratedError
from specdec_ext.models.tensor_parallel import agreed_clock, agreed_seed

NEW_TOKENS = 14
FEW = ("none", "oracle_tree", "noisy_chain", "ngram")
BATCHES = {"one": (9,), "ragged": (5, 9, 2)}


def fresh(name: str = "llama"):
    return copy.deepcopy(tiny_model(name))


def check_same_text(
    model, reference=None, drafters=FEW, batches=tuple(BATCHES), new_tokens=NEW_TOKENS
):
    """Check that our text of ``model`` is that of ``reference``, by default of transformers."""
    if reference is None:
        reference = functools.partial(model.generate, do_sample=False)
    for batch in batches:
        ids, mask = prompts(BATCHES[batch])
        kwargs = {"attention_mask": mask, "max_new_tokens": new_tokens}
        expected = reference(input_ids=ids, **kwargs)
        answers = generated(expected, ids.shape[1])
        for name in drafters:
            drafter = make_drafter(name, model, answers)
            actual = specdec_ext.generate(model, ids, drafter=drafter, do_sample=False, **kwargs)
            assert torch.equal(actual, expected), (name, batch)


# --- quantised weights


def int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Packed(nn.Module):
    """A module with packed weights that is no ``nn.Linear``."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, scale = int8(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, input):
        return nn.functional.linear(input, self.weight.to(input.dtype) * self.scale)


class PackedLinear(nn.Linear):
    """A subclass whose weight is an int8 parameter, as in bitsandbytes."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        weight, self.scale = int8(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input):
        return nn.functional.linear(input, self.weight.to(input.dtype) * self.scale)


@pytest.mark.parametrize("kind", [Packed, PackedLinear])
def test_quantised_modules_have_their_text(kind):
    model = fresh()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, kind(child))
    assert any(type(module) is kind for module in model.modules())
    check_same_text(model)


@pytest.mark.parametrize("scheme", ["int8", "int4", "int8-activations"])
def test_torchao_models_have_their_text(scheme):
    """With integer activations a last bit of attention may change the text, so there it is compared with our
    plain decoding."""
    quantisation = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config = {
        "int8": lambda: quantisation.Int8WeightOnlyConfig(),
        "int4": lambda: quantisation.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantisation.PerGroup(32)
        ),
        "int8-activations": lambda: quantisation.Int8DynamicActivationInt8WeightConfig(),
    }[scheme]()
    model = fresh()
    quantisation.quantize_(model, config)
    ours = functools.partial(specdec_ext.generate, model, do_sample=False, drafter=None)
    check_same_text(model, ours if scheme == "int8-activations" else None)


# --- adapters


def adapted(config: str, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    made = getattr(peft, config)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(fresh(), made).eval()


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_lora_models_have_their_text(options):
    model = adapted("LoraConfig", **LORA, **options)
    ids, _ = prompts((9,))
    plain = tiny_model("llama").generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert not torch.equal(model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False), plain)
    check_same_text(model)
    check_same_text(model.merge_and_unload())


def test_adapters_may_be_switched_between_calls():
    model = adapted("LoraConfig", **LORA)
    check_same_text(model)
    with model.disable_adapter():
        check_same_text(model, functools.partial(tiny_model("llama").generate, do_sample=False))


def test_draft_model_may_be_wrapped():
    wrapped = [torch.compile(fresh(), backend="eager"), adapted("LoraConfig", **LORA)]
    ids, _ = prompts((9,))
    for draft in wrapped:
        assert isinstance(resolve_drafter(draft, tiny_model("llama")), DraftModelDrafter)
        actual = specdec_ext.generate(tiny_model("llama"), ids, drafter=draft, max_new_tokens=6)
        expected = specdec_ext.generate(tiny_model("llama"), ids, drafter=None, max_new_tokens=6)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused(kind):
    model = adapted(kind, num_virtual_tokens=3)
    with pytest.raises(ValueError, match="virtual tokens"):
        specdec_ext.generate(model, input_ids=prompts((9,))[0], max_new_tokens=4)
    check_same_text(model.get_base_model())


def test_adapters_of_rows_are_refused():
    model = adapted("LoraConfig", **LORA)
    with pytest.raises(ValueError, match=r"adapter_names .*set_adapter"):
        names = ["default", "__base__"]
        specdec_ext.generate(model, input_ids=prompts((9, 9))[0], adapter_names=names)


def test_alora_adapter_is_refused():
    model = adapted("LoraConfig", **LORA, alora_invocation_tokens=[5, 6])
    with pytest.raises(NotAcceleratedError, match="aLoRA"):
        specdec_ext.generate(model, input_ids=prompts((9,))[0], max_new_tokens=4)


# --- weights on other devices


def dispatched(model, places: tuple, folder):
    """A model whose layers are at these places in turn, and whose other modules are on the CPU."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    blocks = {f"model.{name}": "cpu" for name, _ in model.model.named_children()}
    del blocks["model.layers"]
    blocks |= {f"model.layers.{i}": places[i % len(places)] for i in range(3)} | {"lm_head": "cpu"}
    options = dict(main_device="cpu", offload_dir=str(folder), force_hooks=True)
    accelerate.dispatch_model(model, blocks, **options)
    return model


@pytest.mark.parametrize("where", ["cpu", "disk", "mixed"])
def test_offloaded_models_have_their_text(where, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, cpu = fresh(), torch.device("cpu")
    if where == "cpu":
        accelerate.cpu_offload(model, cpu)
    elif where == "disk":
        accelerate.disk_offload(model, str(tmp_path), cpu)
    else:
        dispatched(model, ("cpu", "disk"), tmp_path)
    assert any(hasattr(module, "_hf_hook") for module in model.modules())
    check_same_text(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a second device is a GPU")
@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_layers_may_be_on_two_devices(name, tmp_path):
    """The cache of a layer is on the device of the layer."""
    model = dispatched(fresh(name), ("cpu", "cuda:0"), tmp_path)
    check_same_text(model)


def test_model_without_weights_is_refused():
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is on the meta device"):
        specdec_ext.generate(fresh().to("meta"), prompts((4,))[0], max_new_tokens=2)


def test_model_without_some_weights_is_refused():
    model = fresh()
    specdec_ext.generate(model, prompts((4,))[0], max_new_tokens=2)
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"lm_head\.weight is on the meta device"):
        specdec_ext.generate(model, prompts((4,))[0], max_new_tokens=2)


def test_modules_without_generate_are_refused():
    model = nn.DataParallel(fresh())
    with pytest.raises(TypeError, match=r"model is a DataParallel.*pass .*model\.module"):
        specdec_ext.generate(model, prompts((4,))[0])
    with pytest.raises(
        TypeError, match=r"model is a Linear, which has no method generate; .* model$"
    ):
        specdec_ext.generate(nn.Linear(2, 2), prompts((4,))[0])


def test_call_does_not_walk_over_the_weights_in_a_single_process(monkeypatch):
    """The walk takes time in each call. Only models of several processes need it."""
    model = fresh()
    monkeypatch.setattr(
        type(model), "parameters", lambda *args: pytest.fail("walked over the weights")
    )
    assert agreed_seed(model, 3) == 3
    assert agreed_clock(model, len) is len


TENSOR_PARALLEL = """
import sys
import torch
from transformers import AutoModelForCausalLM
from helpers.drafters.head_cases import head_of
from helpers.models.tiny import generated, make_drafter, prompts
from torch.distributed.tensor import DTensor
import specdec_ext
from specdec_ext import HeadDrafter, save_draft

folder, drafters = sys.argv[1], sys.argv[2:]
whole = AutoModelForCausalLM.from_pretrained(folder).eval()
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
rank = torch.distributed.get_rank()
assert model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0] == 16  # of 32
ids, mask = prompts((5, 9))
kwargs = dict(attention_mask=mask, max_new_tokens=14)
expected = whole.generate(ids, do_sample=False, **kwargs)
for name in drafters:
    drafter = make_drafter(name, model, generated(expected, 9))
    actual = specdec_ext.generate(model, ids, do_sample=False, drafter=drafter, **kwargs)
    assert torch.equal(actual, expected), (rank, name)
gathered, full_tensor = [], DTensor.full_tensor
DTensor.full_tensor = lambda self: gathered.append(self) or full_tensor(self)
for kind in ("eagle1", "eagle3.1"):  # without a head of its own, and without an embedding
    head = head_of(kind)
    assert not (head.config.own_lm_head and head.config.own_embedding), kind
    for each in (whole, model, model):
        drafter = HeadDrafter(head)
        actual = specdec_ext.generate(each, ids, do_sample=False, drafter=drafter, **kwargs)
        assert torch.equal(actual, expected), (rank, kind)
folder_of_head = f"{folder}/head{rank}"
save_draft(head_of("eagle1"), folder_of_head)
model.config.specdec_ext_draft = folder_of_head
for _ in range(2):
    actual = specdec_ext.generate(model, ids, do_sample=False, drafter="auto", **kwargs)
    assert torch.equal(actual, expected), rank
assert 1 <= len(gathered) <= 2, gathered  # lm_head, and the embedding where it is spread: once each
DTensor.full_tensor = full_tensor
torch.manual_seed(rank)  # processes that draw different seeds by themselves
text = specdec_ext.generate(model, ids, do_sample=True, **kwargs)
texts = [torch.empty_like(text) for _ in range(2)]
torch.distributed.all_gather(texts, text)
assert torch.equal(*texts), rank
seeded = [specdec_ext.generate(each, ids, do_sample=True, seed=3, **kwargs) for each in (whole, model)]
assert torch.equal(*seeded), rank
torch.distributed.destroy_process_group()
print(f"rank {rank} agrees")  # in one piece: both processes write here
"""


@pytest.mark.slow
def test_tensor_parallel(tmp_path):
    """Two processes share the heads, and decide alike without a word about it but for the seed."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    tiny_model("llama").save_pretrained(tmp_path)
    script = tmp_path / "tensor_parallel.py"
    script.write_text(TENSOR_PARALLEL)
    search = os.pathsep.join([str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path), *DRAFTERS],
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"rank {rank} agrees" in done.stdout for rank in range(2))


# --- compiled models


def one_layer():
    """Every new shape of a frame is compiled anew, and a layer is a frame."""
    model = fresh()
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return model


def compiled_forward(model, **options):
    model.forward = torch.compile(model.forward, **options)
    return model


def compiled_layers(model, **options):
    for layer in model.model.layers:
        layer.compile(**options)
    return model


@pytest.mark.parametrize("how", [torch.compile, compiled_layers])
def test_compiled_models_have_their_text(how):
    """torch compiles at most eight graphs per frame, and runs further shapes uncompiled."""
    torch._dynamo.reset()
    model = how(one_layer(), backend="eager")
    check_same_text(model, drafters=("oracle_tree",), batches=("ragged",), new_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, False, True], ids=["auto", "static", "dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", [compiled_forward, compiled_layers])
def test_models_compiled_in_every_way_have_their_text(how, backend, dynamic):
    torch._dynamo.reset()
    check_same_text(how(fresh(), backend=backend, dynamic=dynamic))


def test_model_compiled_as_one_graph_is_refused():
    """The masks of a tree break the graph."""
    torch._dynamo.reset()
    model = compiled_forward(one_layer(), backend="eager", fullgraph=True)
    with pytest.raises(NotAcceleratedError, match="compiled with fullgraph=True"):
        specdec_ext.generate(model, prompts((9,))[0], max_new_tokens=20, drafter="lookahead")


def test_other_models_compile_as_one_graph_after_a_call():
    """The call's registrations with transformers are removed."""
    torch._dynamo.reset()
    ids, _ = prompts((9,))
    specdec_ext.generate(tiny_model("llama"), ids, max_new_tokens=4)
    model = torch.compile(one_layer(), backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, one_layer()(ids).logits)


# --- dtypes and modes


def test_float64_models_have_their_text():
    check_same_text(fresh().double())


def test_models_of_mixed_dtypes_have_their_text():
    """The lm_head has another dtype than the layers, as in quantising libraries."""
    model = fresh()
    model.lm_head.double()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    check_same_text(model)


def test_texts_under_autocast_differ_only_at_near_ties():
    """Products are in bfloat16."""
    model = tiny_model("llama")
    for length in (5, 9, 16):
        ids, _ = prompts((length,))
        kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model.generate(ids, **kwargs)
            for name in FEW:
                drafter = make_drafter(name, model, generated(expected, length))
                actual = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
                assert compare_runs(model, actual[0], expected[0], length).verdict != "bug"


def test_training_mode_without_dropout_is_accepted():
    check_same_text(fresh().train())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: None, r"drop\.p is 0\.1.*model\.eval\(\)"),
        (lambda model: model.gradient_checkpointing_enable(), "gradient checkpointing"),
    ],
    ids=["dropout", "checkpointing"],
)
def test_training_mode_with_dropout_is_refused(change, message):
    model = fresh("gpt2").train()
    change(model)
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(model, prompts((4,))[0], max_new_tokens=2)


def test_attention_dropout_is_refused_in_training():
    model = fresh().train()
    model.model.layers[1].self_attn.attention_dropout = 0.25
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.attention_dropout is 0\.25"):
        specdec_ext.generate(model, prompts((4,))[0], max_new_tokens=2)
    check_same_text(model.eval())
