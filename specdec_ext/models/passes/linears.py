"""Row-invariant linear layers during a pass on the CPU.

A matrix library sums in an order that depends on the number of rows, so a token's logits depend on the number
of tokens that are scored with it. ``ops.linear`` always sums in the same order: one for the few rows of a
decoding pass, one for the many rows of a prompt. While :func:`row_invariant_linears` is open, plain
``torch.nn.Linear`` modules, the ``Conv1D`` of GPT-2, and layers of weights in 8 or 4 bits
(``models/quantised``), use it in this thread. Hooks run as usual, and afterwards the modules are as before.

The following are computed by their own forward: other subclasses, parametrized layers, layers that quantise
their input, modules whose ``forward`` other software has replaced (offloading), compiled models, training
mode, autocast, calls that record gradients, dtypes other than float32 and bfloat16. The linear layer inside a
LoRA layer is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdec_ext import ops
from specdec_ext.models.patching.changes import binding
from specdec_ext.models.patching.forwards import is_compiled, own_forward_replaced, replaced_forward
from specdec_ext.models.quantised.sources import weight_of
from specdec_ext.ops.quantise import QuantisedWeight

# In the current pass of this thread, the modules that sum in the order for few rows; None for all.
_few_rows: ContextVar[Collection[nn.Module] | None] = ContextVar("specdec_few_rows", default=None)


def _linear(module: nn.Module, forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    few_rows = _few_rows.get()
    many_rows = few_rows is not None and module not in few_rows
    weight, bias = matrix_of(module)
    if (
        torch.compiler.is_compiling()
        or module.training
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or weight is None
        or input.dtype not in (torch.float32, torch.bfloat16)
        or (bias is not None and bias.dtype != input.dtype)
        or (isinstance(weight, Tensor) and weight.dtype != input.dtype)
    ):
        return forward(input)
    if input.stride(-1) != 1 or input.ndim > 3:
        input = input.contiguous()
    return ops.linear(input, weight, bias, many_rows=many_rows)


def matrix_of(module: nn.Module) -> tuple[Tensor | QuantisedWeight | None, Tensor | None]:
    """Return the weight and the bias of a linear layer; no weight if the op can't take it."""
    parameters = module._parameters
    kind = type(module)
    if kind in (nn.Linear, Conv1D) and type(weight := parameters["weight"]) is nn.Parameter:
        return weight if kind is nn.Linear else weight.T, parameters["bias"]
    return weight_of(module), getattr(module, "bias", None)


def row_invariant(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that :func:`row_invariant_linears` can replace; none if compiled."""
    modules = list(model.modules())
    # Compiled code is specialised on the unpatched modules.
    if isinstance(model, torch._dynamo.OptimizedModule) or any(map(is_compiled, modules)):
        return []
    return [
        module for module in modules if is_readable(module) and not own_forward_replaced(module)
    ]


def is_readable(module: nn.Module, device: str = "cpu") -> bool:
    """Whether the op can take the weight and the bias of this linear layer.

    Args:
        device: where they have to be; "meta" for a model that is only planned.
    """
    weight, bias = matrix_of(module)
    if isinstance(weight, QuantisedWeight):
        kept = (torch.float32, torch.bfloat16)
        return weight.codes.device.type == device and (
            bias is None
            or (bias.dtype in kept and bias.device.type == device and bias.is_contiguous())
        )
    return (
        weight is not None
        and weight.layout == torch.strided
        and weight.device.type == device
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.stride(0 if type(module) is Conv1D else 1) == 1
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
    )


@contextmanager
def row_invariant_linears(
    modules: Sequence[nn.Module], few_rows: Collection[nn.Module] | None = None
) -> Iterator[None]:
    """Make these modules, from :func:`row_invariant`, compute row-invariantly in this thread.

    Contexts may be nested, and several threads may open them for the same modules.

    Args:
        modules: the modules.
        few_rows: those that sum in the order for few rows (:func:`specdec_ext.ops.linear`), None for all. The
            others sum in the order for many.
    """
    with replaced_forward(modules, _linear), binding(_few_rows, few_rows):
        yield
