"""Checkpoints that other libraries load: their weights bit for bit, and models after ``repack``."""

import importlib.util

import pytest
import torch
from helpers.models.quantised_checkpoints import SIZES, write
from helpers.models.tiny import random_model, tiny_model
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

import specdec_ext
from specdec_ext import QuantisationReport, quantize, repack
from specdec_ext.models.passes.known_code import is_untouched
from specdec_ext.models.quantised.sources import is_foreign, weight_of
from specdec_ext.ops.quantise import QuantisedWeight

DTYPES = [torch.float32, torch.bfloat16]


def needs(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    reason = f"{' and '.join(missing)} not installed"
    return pytest.mark.skipif(bool(missing), reason=reason)


needs_torchao = needs("torchao")
needs_compressed_tensors = needs("compressed_tensors")
needs_bitsandbytes = needs("bitsandbytes")
needs_gptqmodel = needs("gptqmodel", "optimum")


def linears(model):
    return {name: each for name, each in model.named_modules() if is_foreign(each)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder with a plain model."""
    folder = tmp_path_factory.mktemp("plain")
    random_model("llama", **SIZES).save_pretrained(folder)
    return folder


def assert_repacked(model, tmp_path, rtol=1e-4):
    """The model's own logits are those after ``repack``; it decodes with drafts, and is saved and loaded."""
    ids = torch.arange(1, 9)[None]
    weights = {name: weight_of(each) for name, each in linears(model).items()}
    assert weights and all(isinstance(each, QuantisedWeight) for each in weights.values())
    before = {name: each.dequantise() for name, each in weights.items()}
    own = [type(each) for each in model.modules()]
    repack(model)
    assert not linears(model) and own != [type(each) for each in model.modules()]
    assert is_untouched(model)  # no hook of the library is left
    for name, expected in before.items():
        assert torch.equal(model.get_submodule(name).weight.dequantise(), expected)
    with torch.no_grad():
        logits = model(ids).logits
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    for drafter in (None, "ngram"):
        text = specdec_ext.generate(model, ids, max_new_tokens=24, do_sample=False, drafter=drafter)
        assert model.dtype != torch.float32 or torch.equal(text, expected)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, logits)
    assert QuantisationReport.of(loaded).nbytes == QuantisationReport.of(model).nbytes
    return logits


# --- torchao


def torchao_configs():
    if importlib.util.find_spec("torchao") is None:
        return []
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    from torchao.quantization.granularity import PerAxis, PerTensor
    from torchao.quantization.quant_primitives import MappingType

    found = [
        Int8WeightOnlyConfig(),
        Int8WeightOnlyConfig(granularity=PerTensor()),
        Int8WeightOnlyConfig(granularity=PerGroup(32)),
    ]
    for dtype in (torch.int4, torch.int8):
        for granularity in (PerGroup(32), PerGroup(64), PerGroup(128), PerAxis(0)):
            for mapping in (MappingType.SYMMETRIC, MappingType.ASYMMETRIC):
                config = IntxWeightOnlyConfig(dtype, granularity, mapping_type=mapping)
                found.append(config)
    return found


@needs_torchao
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchao_bit_for_bit(dtype):
    from torchao.quantization import quantize_

    kinds = set()
    for config in torchao_configs():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(384, 40)).to(dtype)
        quantize_(module, config)
        weight, found = module[0].weight, weight_of(module[0])
        assert is_foreign(module[0]) and found.shape == (40, 384)
        # With float32 scales, an offset is rounded.
        tolerance = 2e-7 if found.scales.ndim == 3 and dtype == torch.float32 else 0
        torch.testing.assert_close(
            found.dequantise(dtype), weight.dequantize(), rtol=0, atol=tolerance
        )
        if found.bits == 8:
            assert found.codes.data_ptr() == weight.qdata.data_ptr()  # not copied
        kinds.add((found.bits, found.group_size, found.scales.ndim))
    assert len(kinds) >= 12


@needs_torchao
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchao_codes_in_the_order_of_the_processor(dtype, size):
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    for outs, ins in ((48, 384), (64, 640)):
        module = nn.Linear(ins, outs).to(dtype)
        weight = Int4OpaqueTensor.from_hp(module.weight.detach(), [1, size])
        module.weight = nn.Parameter(weight, requires_grad=False)
        found = weight_of(module)
        unit = torch.eye(ins, dtype=dtype)
        assert torch.equal(found.dequantise(dtype).T, linear(unit, module.weight))


@needs_torchao
@pytest.mark.parametrize(
    "change",
    [
        dict(qdata=lambda x: x[:, :-1].contiguous()),
        dict(qdata=lambda x: x[:-1]),
        dict(qdata=lambda x: x.T),
        dict(scale_and_zero=lambda x: x[:-1]),
        dict(block_size=lambda x: [1, 16]),
    ],
    ids=["width", "height", "strides", "scales", "groups"],
)
def test_torchao_sizes_that_do_not_fit_are_not_read(change):
    """torch's product would read memory beyond the codes."""
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    module = nn.Linear(128, 64)
    weight = Int4OpaqueTensor.from_hp(module.weight.detach(), [1, 32])
    for name, changed in change.items():
        setattr(weight, name, changed(getattr(weight, name)))
    module.weight = nn.Parameter(weight, requires_grad=False)
    assert is_foreign(module) and weight_of(module) is None


@needs_torchao
def test_torchao_with_quantised_inputs_is_not_read(plain):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    before = [type(each) for each in model.modules()]
    assert all(weight_of(each) is None for each in linears(model).values())
    with pytest.raises(
        ValueError, match=r"q_proj \(Linear\) can't be repacked: its format is not read"
    ):
        repack(model)
    with pytest.raises(ValueError, match="is quantised already"):
        quantize(model)
    assert [type(each) for each in model.modules()] == before


@needs_torchao
@pytest.mark.parametrize("number", range(4))
def test_torchao_checkpoints(plain, number, tmp_path):
    """Quantised by transformers, saved, and loaded again."""
    from transformers import TorchAoConfig

    config = TorchAoConfig([*torchao_configs()[:1], *torchao_configs()[3:8:2]][number])
    made = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    made.save_pretrained(tmp_path / "torchao")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "torchao")
    with torch.no_grad():
        expected = made(torch.arange(1, 9)[None]).logits
    torch.testing.assert_close(assert_repacked(model, tmp_path), expected, rtol=1e-3, atol=1e-3)


# --- compressed-tensors


def compressed(model, bits, strategy, size, symmetric, inputs=None):
    """Quantise the linear layers of a model, and compress them."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    fields = dict(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy)
    arguments = QuantizationArgs(**fields, **(dict(group_size=size) if size else {}))
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            blocks = {"tensor": (1, -1), "channel": (len(module.weight), 1, -1)}
            shape = blocks.get(strategy, (len(module.weight), -1, size))
            values = module.weight.detach().float().reshape(shape)
            found = calculate_qparams(values.amin(-1), values.amax(-1), arguments)
            for name, tensor in zip(("weight_scale", "weight_zero_point"), found, strict=True):
                if hasattr(module, name):
                    kept = getattr(module, name).data
                    kept.copy_(tensor.reshape(kept.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


@needs_compressed_tensors
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize(
    ("strategy", "size"), [("group", 32), ("group", 64), ("channel", None), ("tensor", None)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_compressed_tensors_bit_for_bit(bits, strategy, size, symmetric):
    for dtype in DTYPES:
        model = random_model("llama", **SIZES).to(dtype)
        compressor = compressed(model, bits, strategy, size, symmetric)
        found = {name: weight_of(each) for name, each in linears(model).items()}
        assert len(found) == 14 and {each.bits for each in found.values()} == {bits}
        compressor.decompress_model(model)
        for name, weight in found.items():
            expected = model.get_submodule(name).weight
            tolerance = 0 if symmetric or dtype != torch.float32 else 1e-6
            torch.testing.assert_close(weight.dequantise(dtype), expected, rtol=0, atol=tolerance)


@needs_compressed_tensors
@pytest.mark.parametrize(
    ("bits", "strategy", "size"), [(4, "group", 32), (4, "channel", None), (8, "channel", None)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compressed_tensors_checkpoints(bits, strategy, size, dtype, tmp_path):
    """The library would replace the codes by numbers in the first pass; ``repack`` keeps them."""
    made = random_model("llama", **SIZES).to(dtype)
    compressor = compressed(made, bits, strategy, size, True)
    made.save_pretrained(tmp_path / "made")
    compressor.update_config(tmp_path / "made")
    plain, model = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=dtype) for _ in range(2)
    )
    with torch.no_grad():
        expected = plain(torch.arange(1, 9)[None]).logits
    assert (
        weight_of(plain.model.layers[0].mlp.up_proj) is None
    )  # numbers, and a forward of the library
    tolerance = 1e-3 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(
        assert_repacked(model, tmp_path), expected, rtol=tolerance, atol=tolerance
    )
    with pytest.raises(ValueError, match="a pass has changed its tensors"):
        repack(plain)


@needs_compressed_tensors
def test_compressed_tensors_with_quantised_inputs_are_not_read():
    from compressed_tensors.quantization import QuantizationArgs

    inputs = QuantizationArgs(
        num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True
    )
    model = random_model("llama", **SIZES)
    compressed(model, 8, "channel", None, True, inputs)
    assert linears(model) and all(weight_of(each) is None for each in linears(model).values())


# --- bitsandbytes


@needs_bitsandbytes
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bitsandbytes_checkpoints(plain, kind, nested, dtype, tmp_path):
    from bitsandbytes.functional import dequantize_4bit
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=dtype, quantization_config=config, device_map={"": "cpu"}
    )
    for each in linears(model).values():
        expected = dequantize_4bit(each.weight.data, each.weight.quant_state)
        assert torch.equal(weight_of(each).dequantise(expected.dtype), expected)
    assert_repacked(model, tmp_path)
    assert model.to(torch.bfloat16).dtype == torch.bfloat16  # bitsandbytes' models refuse


@needs_bitsandbytes
def test_bitsandbytes_of_8_bits_is_not_read(plain):
    from transformers import BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"}
    )
    assert linears(model) and all(weight_of(each) is None for each in linears(model).values())
    with pytest.raises(ValueError, match=r"q_proj \(Linear8bitLt\) can't be repacked"):
        repack(model)


# --- GPTQ and AWQ


@needs_gptqmodel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "size", "symmetric", "version"),
    [(4, 32, True, 1), (4, 128, False, 1), (4, -1, False, 2), (8, 32, False, 1), (8, -1, True, 2)],
)
def test_gptq_checkpoints(bits, size, symmetric, version, dtype, tmp_path):
    weights = write(tmp_path / "gptq", "gptq", bits, size, symmetric, version)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gptq", dtype=dtype)
    assert linears(model).keys() == weights.keys()
    for name, each in linears(model).items():
        found = weight_of(each)
        assert torch.equal(found.dequantise(), weights[name])
        assert torch.equal(found.dequantise(torch.float16).T, each.dequantize_weight())
    assert_repacked(model, tmp_path)


@needs_gptqmodel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 128])
def test_awq_checkpoints(size, dtype, tmp_path):
    weights = write(tmp_path / "awq", "awq", 4, size, symmetric=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "awq", dtype=dtype)
    assert linears(model).keys() == weights.keys()
    inputs = torch.randn(3, 256).to(dtype)
    for name, each in linears(model).items():
        found = weight_of(each)
        assert torch.equal(found.dequantise(), weights[name])
        if each.in_features == 256:  # the library computes in float16
            own = each(inputs).float()
            ours = linear(inputs.float(), found.dequantise())
            assert float((own - ours).abs().max() / ours.abs().max()) < 0.01
    assert_repacked(AutoModelForCausalLM.from_pretrained(tmp_path / "awq", dtype=dtype), tmp_path)


@needs_gptqmodel
def test_gptq_in_the_order_of_activations_is_not_read(tmp_path):
    write(tmp_path / "gptq", "gptq", 4, 32)
    path = tmp_path / "gptq" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in tensors:
        if name.endswith("g_idx"):
            tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path, {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gptq", dtype=torch.float32)
    assert all(weight_of(each) is None for each in linears(model).values())


# --- repack itself


def test_what_repack_refuses():
    with pytest.raises(TypeError, match="model is a Linear; expected a Hugging Face model"):
        repack(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="has no layers that another library has quantised; use quantize"
    ):
        repack(tiny_model("llama"))
    with pytest.raises(
        ValueError, match=r"is torch.float16 on cpu; load it on the CPU with dtype="
    ):
        repack(random_model("llama").half())
