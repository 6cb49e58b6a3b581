import pytest
import torch

from specdec_ext import ops
from specdec_ext.ops.quantise import QuantisedWeight


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Until the op takes a QuantisedWeight."""
    linear = ops.linear

    def product(input, weight, bias=None, *, many_rows=False):
        if isinstance(weight, QuantisedWeight):
            weight = weight.dequantise(torch.float32)
            made = torch.nn.functional.linear(input.float(), weight)
            return (made if bias is None else made + bias.float()).to(input.dtype)
        return linear(input, weight, bias, many_rows=many_rows)

    monkeypatch.setattr(ops, "linear", product)
