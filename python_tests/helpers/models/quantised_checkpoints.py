"""Checkpoints of tiny models in the formats of GPTQ and AWQ, and their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers.models.tiny import random_model
from safetensors.torch import save_file
from torch import Tensor, nn

SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, attention_bias=True)


def words(codes: Tensor, bits: int, order: range | tuple[int, ...] | None = None) -> Tensor:
    """Pack ``[rows, n]`` unsigned numbers into int32 ``[rows, n * bits / 32]``, the lowest bits first.

    ``order[i]`` is the number of a word that is in place i.
    """
    per_word = 32 // bits
    packed = torch.zeros(len(codes), codes.shape[1] // per_word, dtype=torch.int64)
    for place, number in enumerate(order or range(per_word)):
        packed |= codes[:, number::per_word].long() << bits * place
    return packed.to(torch.int32)


def random_codes(
    outs: int, ins: int, bits: int, size: int, symmetric: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes ``[outs, ins]``, zero points and float16 scales ``[outs, groups]``, and the weights."""
    groups = -(-ins // size)
    codes = torch.randint(0, 1 << bits, (outs, ins), generator=generator)
    zeros = torch.randint(1, 1 << bits, (outs, groups), generator=generator)
    if symmetric:
        zeros.fill_(1 << bits - 1)
    scales = (torch.rand(outs, groups, generator=generator) * 0.02 + 0.01).half()
    scales *= 16 / (1 << bits)
    group = torch.arange(ins) // size
    return codes, zeros, scales, (codes - zeros[:, group]).float() * scales.float()[:, group]


def gptq_tensors(
    codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, size: int
) -> dict[str, Tensor]:
    """Zero points as they are ("gptq_v2"); files of "gptq" have them less one."""
    return {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words(zeros.T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // size).int(),
    }


def awq_tensors(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(codes.T, 4, order),
        "qzeros": words(zeros.T, 4, order),
        "scales": scales.T.contiguous(),
    }


def write(
    folder: Path, method: str, bits: int, group_size: int, symmetric: bool = True, version: int = 1
) -> dict[str, Tensor]:
    """Write a checkpoint of the method "gptq" or "awq"; return the weights of its quantised layers.

    Args:
        version: of GPTQ's zero points.
    """
    model = random_model("llama", **SIZES)
    model.save_pretrained(folder)
    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and name != "lm_head"
    }
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.removesuffix(".weight") not in layers
    }
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, layer in layers.items():
        outs, ins = layer.weight.shape
        size = ins if group_size == -1 else group_size
        codes, zeros, scales, weights[name] = random_codes(
            outs, ins, bits, size, symmetric, generator
        )
        if method == "awq":
            made = awq_tensors(codes, zeros, scales)
        else:
            made = gptq_tensors(codes, zeros - int(version == 1), scales, bits, size)
        tensors |= {f"{name}.{part}": tensor for part, tensor in made.items()}
        tensors[f"{name}.bias"] = torch.randn(outs, generator=generator).half()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group_size}
    if method == "awq":
        fields |= {"zero_point": True, "version": "gemm"}
    else:
        name = "gptq" if version == 1 else "gptq_v2"
        fields |= {"sym": symmetric, "desc_act": False, "checkpoint_format": name}
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": fields}))
    return weights
