"""Optimisers, and the learning rate schedule: warm-up, stable, decay (Hu et al. 2024, MiniCPM, section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

_WEIGHT_DECAY = 0.01
_BETAS = (0.9, 0.95)
# Factor on AdamW's learning rate when it is used beside Muon, for embeddings, output heads and norms.
_BESIDE_MUON = 0.3


def make_optimizers(module: nn.Module, kind: str, learning_rate: float) -> list[optim.Optimizer]:
    """Make the optimisers: only AdamW, or Muon for the matrices of the layers and AdamW for the rest.

    Args:
        module: the module to train.
        kind: ``"adamw"``, or ``"muon"`` (Jordan et al. 2024).
        learning_rate: peak learning rate.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        table = "lm_head" in name or "embed_tokens" in name
        (rest if table or parameter.ndim != 2 else matrices).append(parameter)
    if kind == "adamw":
        return [optim.AdamW([*matrices, *rest], learning_rate, _BETAS, weight_decay=0.0)]
    muon = optim.Muon(
        matrices,
        learning_rate,
        weight_decay=_WEIGHT_DECAY,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    beside = optim.AdamW(rest, learning_rate * _BESIDE_MUON, _BETAS, weight_decay=0.0)
    return [muon, beside]


class Float32Products(TorchDispatchMode):
    """While it is open, matrix products of bfloat16 tensors are computed in float32 and rounded.

    torch's Muon multiplies in bfloat16, which is slow on some processors (:func:`has_fast_bfloat16`).
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if func not in products or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        wide: Tensor = func(*(each.float() for each in args), **kwargs)
        return wide.bfloat16()


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether torch multiplies matrices in bfloat16 at least as fast as in float32.

    On processors without AVX-512, oneDNN has no such products, and torch's own take 4 to 30 times as long.
    """
    if device.type != "cpu":
        return True
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


def scale(step: int, total: int, warmup: int, decay: float) -> float:
    """Return the factor on the peak learning rate in a step.

    It rises to 1 over ``warmup`` steps, and falls to 0.02 over the last share ``decay`` of ``total`` steps.
    """
    remaining = (total - step) / max(1.0, decay * total)
    return min(1.0, (step + 1) / max(1, warmup), max(remaining, 0.02))
