"""``weight_of``: the weights of other libraries' layers, bit for bit.

The layers of GPTQ, AWQ and bitsandbytes are stand-ins with the names of the classes and the tensors of the
formats, so that the readers are tested where the libraries are not installed. The libraries themselves read
tiny checkpoints in ``test_repack.py``.
"""

import gc
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers.models.quantised_checkpoints import awq_tensors, gptq_tensors, random_codes
from torch import nn

from specdec_ext.models.quantised.linear import QuantisedLinear
from specdec_ext.models.quantised.sources import is_foreign, weight_of
from specdec_ext.models.quantised.sources.source import grouped, unpacked
from specdec_ext.ops.quantise import QuantisedWeight


def test_plain_layers_and_ours():
    plain = nn.Linear(4, 3)
    assert weight_of(plain) is plain.weight and not is_foreign(plain)
    ours = QuantisedLinear(QuantisedWeight.pack(torch.zeros(3, 4).int(), torch.ones(3, 1), bits=4))
    assert weight_of(ours) is ours.weight and not is_foreign(ours)
    assert weight_of(nn.Embedding(4, 3)) is None and weight_of(nn.ReLU()) is None

    class Mine(nn.Linear):
        pass

    assert weight_of(Mine(4, 3)) is None  # its forward may be another
    nn.utils.parametrize.register_parametrization(plain, "weight", nn.Identity())
    assert weight_of(plain) is None


# --- words and groups


def test_every_code_in_every_place_of_a_word():
    for bits in (4, 8):
        places = 32 // bits
        for place, code in itertools.product(range(places), range(1 << bits)):
            word = torch.tensor([[code << bits * place]]).to(torch.int32)
            expected = [code if i == place else 0 for i in range(places)]
            assert unpacked(word, bits)[0].tolist() == expected


@pytest.mark.parametrize("size", [32, 64, 96, 128, 160, 192, 384])
@pytest.mark.parametrize("ins", [384, 400])
def test_groups_of_any_multiple_of_32(size, ins):
    codes, zeros, scales, weights = random_codes(
        6, ins, 4, size, False, torch.Generator().manual_seed(0)
    )
    offsets = -zeros * scales.float()
    made = grouped(codes, scales, offsets, size, 4)
    assert torch.equal(made.dequantise(), weights)
    assert grouped(codes, scales, None, size, 4).scales.shape == made.scales.shape[:2]


# --- GPTQ and AWQ


class Packed(nn.Module):
    def __init__(self, outs, ins, bits, group_size, tensors):
        super().__init__()
        self.out_features, self.in_features, self.bits, self.group_size = (
            outs,
            ins,
            bits,
            group_size,
        )
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class GPTQQuantLinear(Packed):
    REQUIRES_FORMAT_V2 = True
    __module__ = "gptqmodel.nn_modules.qlinear"


class OldLinear(GPTQQuantLinear):
    REQUIRES_FORMAT_V2 = False
    __module__ = "gptqmodel.nn_modules.qlinear.other"


class AWQuantLinear(Packed):
    REQUIRES_FORMAT_V2 = False
    __module__ = "gptqmodel.nn_modules.qlinear"


def gptq(bits=4, size=32, symmetric=False, kind=GPTQQuantLinear, outs=24, ins=256):
    codes, zeros, scales, weights = random_codes(
        outs, ins, bits, size, symmetric, torch.Generator().manual_seed(1)
    )
    stored = zeros - int(kind is OldLinear)
    group_size = -1 if size == ins else size
    return kind(
        outs, ins, bits, group_size, gptq_tensors(codes, stored, scales, bits, size)
    ), weights


def awq(size=32, outs=24, ins=256):
    codes, zeros, scales, weights = random_codes(
        outs, ins, 4, size, False, torch.Generator().manual_seed(1)
    )
    return AWQuantLinear(outs, ins, 4, size, awq_tensors(codes, zeros, scales)), weights


@pytest.mark.parametrize("kind", [GPTQQuantLinear, OldLinear], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("bits", [8, 4])
def test_gptq(bits, size, symmetric, kind):
    module, weights = gptq(bits, size, symmetric, kind)
    found = weight_of(module)
    assert is_foreign(module)
    assert found.bits == bits and torch.equal(found.dequantise(), weights)
    assert (
        found.scales.ndim == 2
    ) == symmetric  # no offsets where they would be those of the middle
    # What the library computes: the product of float16 numbers.
    assert torch.equal(found.dequantise(torch.float16), weights.half())


@pytest.mark.parametrize("size", [32, 64, 96, 128, 256])
def test_awq(size):
    module, weights = awq(size)
    found = weight_of(module)
    assert is_foreign(module) and torch.equal(found.dequantise(), weights)


def test_the_order_of_activations_is_not_read():
    module, _ = gptq()
    module.g_idx = module.g_idx.flip(0)
    assert weight_of(module) is None
    module.g_idx[:] = 2**31 - 1
    assert weight_of(module) is None


def changed(make=gptq, **changes):
    module, _ = make()
    for name, value in changes.items():
        setattr(module, name, value(getattr(module, name)) if callable(value) else value)
    return module


@pytest.mark.parametrize(
    "module",
    [
        changed(qweight=lambda x: x[:-1]),
        changed(qweight=lambda x: x[:, :-1]),
        changed(qweight=lambda x: x.long()),
        changed(qweight=lambda x: x.view(torch.uint8)),
        changed(qzeros=lambda x: x[:-1]),
        changed(qzeros=lambda x: x.half()),
        changed(scales=lambda x: x[:-1]),
        changed(scales=lambda x: x[:, :-1]),
        changed(g_idx=lambda x: x[:-1]),
        changed(g_idx=None),
        changed(bits=3),
        changed(bits=8),
        changed(group_size=16),
        changed(group_size=0),
        changed(group_size=-32),
        changed(in_features=10**12),
        changed(out_features=8),
        changed(adapter="LoRA"),
        changed(awq, qweight=lambda x: x[:-1]),
        changed(awq, qzeros=lambda x: x[:-1]),
        changed(awq, scales=lambda x: x[:, :-8]),
        changed(awq, bits=8),
        changed(awq, group_size=64),
        changed(awq, qweight=None),
    ],
    ids=[*map(str, range(24))],
)
def test_sizes_that_do_not_fit_are_not_read(module):
    assert is_foreign(module) and weight_of(module) is None


# --- bitsandbytes


class Params4bit(nn.Parameter):
    __module__ = "bitsandbytes.nn.modules"


class Linear4bit(nn.Linear):
    __module__ = "bitsandbytes.nn.modules"


def bitsandbytes(nested=False, blocks=64, outs=6, ins=256, **state):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (outs, ins), generator=generator, dtype=torch.uint8)
    levels = torch.linspace(-1, 1, 16).sort().values
    number = outs * ins // blocks
    scales = torch.rand(number, generator=generator) + 0.1
    made = dict(shape=(outs, ins), code=levels, blocksize=blocks, absmax=scales, nested=nested)
    if nested:
        outer = SimpleNamespace(
            code=torch.linspace(-1, 1, 256), absmax=torch.tensor([0.7]), blocksize=256
        )
        numbers = torch.randint(0, 256, (number,), generator=generator, dtype=torch.uint8)
        scales = outer.code[numbers.long()] * 0.7 + 0.9
        made |= dict(absmax=numbers, state2=outer, offset=torch.tensor(0.9))
    module = Linear4bit(ins, outs, bias=False)
    flat = codes.flatten()
    module.weight = Params4bit((flat[::2] << 4 | flat[1::2])[:, None], requires_grad=False)
    module.weight.quant_state = SimpleNamespace(**{**made, **state})
    weights = levels[codes.long()] * scales.view(outs, -1).repeat_interleave(blocks, 1)
    return module, weights


@pytest.mark.parametrize("blocks", [32, 64, 128, 256])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_bitsandbytes(nested, blocks):
    module, weights = bitsandbytes(nested, blocks)
    found = weight_of(module)
    assert is_foreign(module) and found.bits == 4
    assert torch.equal(found.dequantise(), weights)


@pytest.mark.parametrize(
    "state",
    [
        dict(shape=(6, 258)),
        dict(blocksize=96),
        dict(blocksize=512),
        dict(absmax=torch.ones(3)),
        dict(code=torch.ones(15)),
        dict(packing_format_for_cpu=True),
    ],
    ids=lambda state: next(iter(state)),
)
def test_states_that_do_not_fit_are_not_read(state):
    module, _ = bitsandbytes(**state)
    assert is_foreign(module) and weight_of(module) is None


# --- keeping


def test_a_weight_is_read_once():
    module, _ = gptq()
    found = weight_of(module)
    assert weight_of(module) is found


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
def test_a_changed_tensor_is_read_again(name):
    module, _ = gptq()
    before = weight_of(module).dequantise()
    with torch.no_grad():
        getattr(module, name)[0] += 1  # in place
    once = weight_of(module).dequantise()
    assert not torch.equal(once, before)
    setattr(module, name, getattr(module, name).roll(1, 0))  # replaced
    assert not torch.equal(weight_of(module).dequantise(), once)


def test_a_weight_is_freed_with_its_module():
    module, _ = gptq()
    codes = weakref.ref(weight_of(module).codes)
    assert codes() is not None
    del module
    gc.collect()
    assert codes() is None
