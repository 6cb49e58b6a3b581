"""``QuantisedLinear``: a linear layer with the dequantised weight, whose codes survive everything."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from specdec_ext.models.quantised.linear import QuantisedLinear
from specdec_ext.models.quantised.sources import weight_of
from specdec_ext.ops.quantise import QuantisedWeight


def layer(bits=4, scales=torch.bfloat16, offsets=False, levels=False, bias=True, ins=70, outs=12):
    generator = torch.Generator().manual_seed(0)
    low, high = (-128, 128) if bits == 8 else (0, 16)
    codes = torch.randint(low, high, (outs, ins), generator=generator)
    groups = -(-ins // 32)
    weight = QuantisedWeight.pack(
        codes,
        (torch.rand(outs, groups, generator=generator) + 0.5).to(scales),
        torch.randn(outs, groups, generator=generator) if offsets else None,
        bits=bits,
        levels=torch.linspace(-1, 1, 16) if levels else None,
    )
    made = nn.Parameter(torch.randn(outs, generator=generator)) if bias else None
    return QuantisedLinear(weight, made).eval()


CASES = {
    "8 bits": dict(bits=8, scales=torch.float32),
    "4 bits": dict(),
    "offsets": dict(offsets=True),
    "levels": dict(scales=torch.float32, levels=True, bias=False),
}
every_case = pytest.mark.parametrize("case", CASES)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_the_output_is_that_of_the_dequantised_weight(case, dtype):
    module = layer(**CASES[case]).to(dtype)
    for shape in ((3, 70), (2, 3, 70), (2, 2, 3, 70), (0, 70)):
        input = torch.randn(shape).to(dtype)
        actual = module(input)
        bias = None if module.bias is None else module.bias.float()
        expected = linear(input.float(), module.weight.dequantise(), bias)
        assert actual.dtype == dtype and actual.shape == expected.shape
        torch.testing.assert_close(
            actual, expected.to(dtype), rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-3
        )


@every_case
@pytest.mark.parametrize("convert", ["bfloat16", "half", "double", "float"])
def test_a_change_of_dtype_keeps_codes_and_scales(case, convert):
    module = layer(**CASES[case])
    before = {name: each.clone() for name, each in module.named_buffers()}
    getattr(module, convert)()
    after = dict(module.named_buffers())
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    if module.bias is not None:
        assert module.bias.dtype == getattr(torch, convert)


@every_case
def test_it_moves_with_the_model(case):
    module = layer(**CASES[case]).to("meta")
    assert all(each.is_meta for each in (*module.buffers(), *module.parameters()))
    assert module.to_empty(device="cpu").codes.is_cpu


@every_case
@torch.no_grad()
def test_copies_are_equal_and_independent(case):
    module, input = layer(**CASES[case]), torch.randn(2, 70)
    expected = module(input)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(input), expected)
        copied.codes.zero_()
        assert not torch.equal(copied(input), expected)
    assert torch.equal(module(input), expected)
    other = layer(**CASES[case])
    other.codes.zero_()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(input), expected)


def test_the_weight_follows_its_tensors():
    """It is made once, and made anew if a tensor is replaced."""
    module = layer()
    assert module.weight is module.weight is weight_of(module)
    assert module.weight.codes is module.codes
    module.scales = 2 * module.scales
    assert module.weight.scales is module.scales


def test_what_it_can_not_do_is_an_error():
    module = layer()
    with pytest.raises(
        RuntimeError, match=r"computes on the CPU; it is on cpu, and its input on meta"
    ):
        module(torch.empty(1, 70, device="meta"))
    with pytest.raises(RuntimeError, match=r"it is on meta.*model\.to\('cpu'\)"):
        layer().to("meta")(torch.zeros(1, 70))
    with pytest.raises(RuntimeError, match="has no gradients"):
        module(torch.zeros(1, 70, requires_grad=True))
    with torch.no_grad():
        module(torch.zeros(1, 70, requires_grad=True))
    module(torch.zeros(1, 70))  # nothing asks for gradients


def test_it_shows_its_layout():
    assert repr(layer()) == (
        "QuantisedLinear(in_features=70, out_features=12, bias=True, bits=4, group_size=32, scales=bfloat16)"
    )
    assert "bits=8, group_size=70, scales=float32 with offsets" in repr(
        QuantisedLinear(
            QuantisedWeight.pack(
                torch.zeros(2, 70, dtype=int), torch.ones(2, 1), torch.ones(2, 1), bits=8
            )
        )
    )
