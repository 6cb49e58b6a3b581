"""``QuantisedLinear``: a linear layer whose weight is stored in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specdec_ext import ops
from specdec_ext.models.quantised.kept import kept
from specdec_ext.ops.quantise import QuantisedWeight

# Integers of the same size, by bytes. Their bits survive a change of the module's dtype.
_INTEGERS = {2: torch.int16, 4: torch.int32}


class QuantisedLinear(nn.Module):
    """``nn.Linear`` with a :class:`QuantisedWeight`, for inference on the CPU.

    Codes, scales and levels are buffers. They move with ``.to(device)``, and a change of dtype, such as
    ``.to(torch.bfloat16)``, changes the bias alone: the layer computes in the dtype of its input.

    Args:
        weight: the codes and their scales.
        bias: ``[out_features]``, float32 or bfloat16.
        error: root of the mean squared error of the weights, relative to the root of their mean square; None
            if it is not known.
    """

    codes: Tensor
    scales: Tensor
    levels: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self, weight: QuantisedWeight, bias: nn.Parameter | None = None, error: float | None = None
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.error = error
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("levels", weight.levels)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> QuantisedWeight:
        tensors = [self.codes, self.scales, self.levels]
        return kept(self, [each for each in tensors if each is not None], self._weight)

    def _weight(self) -> QuantisedWeight:
        weight = QuantisedWeight(self.codes, self.scales, self.in_features, self.levels)
        # transformers initialises the weights of some layers by name, unless they have this mark.
        vars(weight)["_is_hf_initialized"] = True
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``; ``input`` is ``[..., in_features]`` float32 or bfloat16.

        Raises:
            RuntimeError: if the layer or the input is not on the CPU, or if gradients are recorded.
        """
        # The meta device, which derives shapes only, plans the memory of a model.
        if not ((input.is_cpu and self.codes.is_cpu) or (input.is_meta and self.codes.is_meta)):
            raise RuntimeError(
                f"a quantised layer computes on the CPU; it is on {self.codes.device}, and its input on "
                f"{input.device}. Move the model back with model.to('cpu')"
            )
        if torch.is_grad_enabled() and input.requires_grad:
            raise RuntimeError(
                "a quantised layer has no gradients. Call the model under torch.no_grad(), as generate does; "
                "to train it, train the model before quantize"
            )
        if input.ndim > 3 or input.stride(-1) != 1:
            input = input.contiguous()
        return ops.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        weight = self.weight
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, bits={weight.bits}, group_size={weight.group_size}, "
            f"scales={describe_scales(weight)}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedLinear:
        """Apply ``fn``, which moves or converts tensors, to the bias and to the bits of the others."""
        buffers = [each for each in self._buffers.values() if each is not None]

        def keeping_bits(tensor: Tensor) -> Tensor:
            if not any(tensor is each for each in buffers) or not tensor.is_floating_point():
                return fn(tensor)
            return fn(tensor.view(_INTEGERS[tensor.itemsize])).view(tensor.dtype)

        super()._apply(keeping_bits, recurse)
        return self


def describe_scales(weight: QuantisedWeight) -> str:
    """The dtype of the scales, and whether groups have offsets: ``"float32 with offsets"``."""
    name = str(weight.scales.dtype).removeprefix("torch.")
    return f"{name} with offsets" if weight.scales.ndim == 3 else name
