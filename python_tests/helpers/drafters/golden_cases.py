"""The reference cases under ``golden/``."""

from __future__ import annotations

import json

import torch
from helpers.places import GOLDEN
from safetensors.torch import load_file

CASES = sorted(path.parent.name for path in GOLDEN.glob("*/meta.json"))
TREES = [name for name in CASES if name.startswith("eagle")]
CHAINS = [name for name in CASES if name.startswith("speculators")]


def load(case: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict, dict]:
    """Return (inputs and expected outputs, draft weights, meta.json, the draft's config.json)."""
    folder = GOLDEN / case
    meta, config = (
        json.loads((folder / name).read_text()) for name in ("meta.json", "draft/config.json")
    )
    tensors = load_file(folder / "case.safetensors")
    return tensors, load_file(folder / "draft" / "model.safetensors"), meta, config


def parents_of(mask: torch.Tensor) -> torch.Tensor:
    """``[nodes]``, the parents in a tree mask: the ancestor with the largest number, -1 for the root."""
    order = torch.arange(len(mask))
    return torch.where(mask & (order < order[:, None]), order, -1).amax(dim=1)
