"""Random draft heads of any config; functions that read and write their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec_ext.heads.config import DraftHead, HeadConfig

VOCAB = 97
_SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_layers=1,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    target_hidden_size=32,
)


def head_config(kind: str = "eagle3", **options: Any) -> HeadConfig:
    """A small config with the sizes of the tiny target models."""
    if kind in ("eagle1", "mtp"):
        kept = {
            "num_features": 1,
            "feature_layers": (-1,),
            "own_lm_head": False,
            "norm_output": kind == "mtp",
        }
    else:
        kept = {"num_features": 3}
    config = {**_SIZES, **kept, **options}
    config.setdefault("sliding_windows", (None,) * config["num_layers"])
    return HeadConfig(kind=kind, **config)


def random_head(
    kind: str = "eagle3", dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> DraftHead:
    """A head with weights scaled by fan-in and norms around 1."""
    config = head_config(kind, **options)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        values = torch.randn(shape, generator=generator)
        if name == "draft_to_target":
            values = torch.randperm(config.vocab_size, generator=generator)[: shape[0]]
            tensors[name] = values.sort().values
        elif "norm" in name:
            tensors[name] = (1 + 0.1 * values).to(dtype)
        else:
            tensors[name] = (values * shape[-1] ** -0.5).to(dtype)
    return DraftHead(config, tensors)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and tensors of a checkpoint in one safetensors file."""
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    return json.loads((folder / "config.json").read_text()), tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_same_head(given: DraftHead, expected: DraftHead) -> None:
    """Configs are equal, and tensors bit for bit."""
    assert given.config == expected.config
    assert given.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert given.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(given.tensors[name], tensor), name
