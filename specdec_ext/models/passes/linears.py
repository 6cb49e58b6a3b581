"""Row-invariant ``nn.Linear`` modules during a decoding pass on the CPU.

A matrix library sums in an order that depends on the number of rows, so a token's logits depend on how
many tokens are scored with it. ``ops.linear`` has one order, and is faster for few rows. While
:func:`row_invariant_linears` is open, plain ``torch.nn.Linear`` modules compute with it in this thread;
hooks run as always, and afterwards the modules are as they were.

Computed by their own forward as before: subclasses, parametrized and quantised linears, modules whose
``forward`` somebody else has replaced (offloading), compiled models, training mode, autocast, calls that
record gradients, dtypes other than float32 and bfloat16. The linear inside a LoRA layer is a plain one.
GPT-2's ``Conv1D`` keeps its weight transposed, which the op can't read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from specdec_ext import ops
from specdec_ext.models.patching.forwards import own_forward_replaced, replaced_forward

# Tokens of a prompt up to which the op is used. A prompt is computed once and the same way with any drafter:
# only speed counts there. Of decoding passes all sizes are computed alike.
MAX_PROMPT_ROWS = 32


def _linear(module: nn.Linear, forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    parameters = module._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    if (
        torch.compiler.is_compiling()
        or module.training
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or weight is None
        or input.dtype != weight.dtype
    ):
        return forward(input)
    if input.stride(-1) != 1 or input.ndim > 3:
        input = input.contiguous()
    return ops.linear(input, weight, bias)


def plain_linears(model: nn.Module) -> list[nn.Linear]:
    """The modules of a model that :func:`row_invariant_linears` can serve; none of a compiled model."""
    modules = list(model.modules())
    # Compiled code is specialised on the modules as they are.
    if isinstance(model, torch._dynamo.OptimizedModule) or any(
        module._compiled_call_impl is not None for module in modules
    ):
        return []
    return [
        module
        for module in modules
        if type(module) is nn.Linear and is_plain(module) and not own_forward_replaced(module)
    ]


def is_plain(module: nn.Linear) -> bool:
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    return (
        type(weight) is nn.Parameter
        and weight.layout == torch.strided
        and weight.is_cpu
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.stride(1) == 1
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
    )


def row_invariant_linears(modules: Sequence[nn.Linear]) -> AbstractContextManager[None]:
    """Let these modules, from :func:`plain_linears`, compute row-invariantly in this thread.

    Contexts may nest, and be open in several threads for the same modules.
    """
    return replaced_forward(modules, _linear)
