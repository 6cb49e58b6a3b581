"""``save_draft``: write a ``DraftHead`` as a checkpoint that other projects can read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_ext.heads.checkpoints.config.layouts import Layout, config_json
from specdec_ext.heads.checkpoints.pair import completed_record
from specdec_ext.heads.checkpoints.storage.names import mtp_name
from specdec_ext.heads.config import DraftHead, HeadConfig


def save_draft(
    head: DraftHead,
    folder: str | Path,
    *,
    layout: Layout = "eagle",
    target: PreTrainedModel | None = None,
    target_name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write a head; ``load_draft`` reads back the same config and the same bits.

    Args:
        head: the head to write.
        folder: created if it does not exist; its config.json and model.safetensors are replaced.
        layout: ``"eagle"`` (SafeAILab, SGLang, vLLM) or ``"speculators"`` (speculators, vLLM).
        target: its name, revision and weights fingerprint are recorded; by default those of the head's
            record.
        target_name: hub id or path of the target, recorded instead of the model's own name.
        tokenizer: the target's tokenizer; its fingerprint is recorded.

    Returns:
        The folder.

    Raises:
        ValueError: for an option that the layout can't express.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r}; expected one of {get_args(Layout)}")
    record = completed_record(head.record, target, target_name, tokenizer)
    config = config_json(head.config, record, layout)
    tensors = _file_tensors(head, layout)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    config["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Written under another name first, so that an interrupt leaves the previous file intact.
    unfinished = folder / "model.safetensors.unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return folder


def _file_tensors(head: DraftHead, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors under the layout's names; none share memory, because safetensors requires that."""
    config = head.config
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.tensors.items():
        if name == "draft_to_target":
            tensors |= _vocabulary_maps(tensor, config)
            continue
        if name == "mask_hidden":
            tensor = tensor.reshape(1, 1, -1)
        if layout == "eagle" and config.kind == "eagle3":
            name = name.replace("layers.0.", "midlayer.")
        elif config.kind == "mtp":
            name = mtp_name(name)
        tensors[name] = tensor.detach().cpu().contiguous()
    embedding, lm_head = (tensors.get(f"{name}.weight") for name in ("embed_tokens", "lm_head"))
    if embedding is not None and lm_head is not None and embedding.data_ptr() == lm_head.data_ptr():
        tensors["lm_head.weight"] = lm_head.clone()
    return tensors


def _vocabulary_maps(targets: Tensor, config: HeadConfig) -> dict[str, Tensor]:
    targets = targets.detach().cpu()
    drafted = torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu")
    drafted[targets] = True
    return {"d2t": targets - torch.arange(len(targets), device="cpu"), "t2d": drafted}
