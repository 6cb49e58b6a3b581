"""Read and write published Medusa heads: the authors' files, files merged with their target, and vLLM's.

============  ===========================================  ========================
ours          authors (merged files: ``medusa_head.``)     vLLM
============  ===========================================  ========================
blocks.i.j    ``i.j.linear.weight``, ``.bias``             ``blocks.i.layers.j``
lm_heads.i    ``i.num_layers.weight``                      ``lm_heads.i``
============  ===========================================  ========================

The numbers of heads and layers are counted from the tensors, because published configs are known to be wrong
about them. vLLM's files may have one ``lm_head`` for all heads (``original_lm_head``), and a ``token_map``
with the target's ids of a truncated vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_ext.display.progress import tracked
from specdec_ext.heads.checkpoints.config.eagle import own_record
from specdec_ext.heads.checkpoints.config.fields import Fields
from specdec_ext.heads.checkpoints.config.layouts import own_section
from specdec_ext.heads.checkpoints.pair import completed_record
from specdec_ext.heads.checkpoints.storage.files import StoredTensor
from specdec_ext.heads.checkpoints.storage.tensors import check_dtypes, read_finite
from specdec_ext.heads.medusa import MedusaConfig, MedusaHeads
from specdec_ext.heads.record import HeadRecord

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
_OUR_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.(weight|bias)")
_PREFIXES = ("medusa_head.", "medusa_heads.")


def looks_like_medusa(keys: Iterable[str]) -> bool:
    """Whether tensors with these names contain Medusa heads."""
    names = (_without_prefix(key) for key in keys)
    return any(_BLOCK.fullmatch(name) or _VLLM_BLOCK.fullmatch(name) for name in names)


def read_medusa(
    tensors: Mapping[str, StoredTensor],
    config: Fields,
    source: str,
    dtype: torch.dtype | None = None,
) -> MedusaHeads:
    """Read the heads of a checkpoint, and check them before and after reading.

    Args:
        tensors: tensors by their names in the file; in a merged file, those without the prefix are the
            target's.
        config: its config.json.
        source: the path or hub id that the caller gave.
        dtype: dtype to convert to; None requires that all tensors have one dtype.

    Raises:
        ValueError: for missing or unexpected tensors, wrong shapes or dtypes, or values that are not finite.
    """
    names = _canonical_names(tensors, source)
    stored = {ours: tensors[name] for ours, name in names.items()}
    medusa = _config(stored, names, config, source)
    shapes = medusa.tensor_shapes()
    if "draft_to_target" not in shapes:
        stored.pop("draft_to_target", None)
    missing = sorted(shapes.keys() - stored.keys())
    surplus = sorted(names[name] for name in stored.keys() - shapes.keys())
    if missing or surplus:
        raise ValueError(
            f"{source} does not hold {medusa.num_heads} complete heads of {medusa.num_layers} layers: it "
            f"lacks {', '.join(missing) or 'nothing'}, and its other tensors are "
            f"{', '.join(surplus) or 'none'}"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ValueError(
                f"{source}: {names[name]} has shape {list(stored[name].shape)}; the other tensors require "
                f"{list(shape)}"
            )
    floating = [name for name in shapes if name != "draft_to_target"]
    check_dtypes({names[name]: stored[name].dtype for name in floating}, dtype, source)
    read = {}
    with tracked(f"reading {source}", len(floating), "tensor") as work:
        for name in floating:
            read[name] = read_finite(stored[name], f"{source}: {names[name]}").to(dtype)
            work.advance()
    if "draft_to_target" in shapes:
        read["draft_to_target"] = _token_map(stored["draft_to_target"], medusa, source)
    record = replace(own_record(config), format="Medusa", layers_from="the last hidden state")
    if record.target_name is None:
        record = replace(record, target_name=config.text("base_model_name_or_path"))
    return MedusaHeads(medusa, read, source, record)


def medusa_config(tensors: Mapping[str, StoredTensor], config: Fields, source: str) -> MedusaConfig:
    """Return the config of the heads of a checkpoint, from the names and shapes of its tensors.

    The arguments are those of :func:`read_medusa`.
    """
    names = _canonical_names(tensors, source)
    return _config({ours: tensors[name] for ours, name in names.items()}, names, config, source)


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _canonical_names(tensors: Iterable[str], source: str) -> dict[str, str]:
    """Return a dict from our name of each tensor to its name in the file."""
    given = sorted(tensors)
    merged = any(
        name.startswith(_PREFIXES) and _BLOCK.fullmatch(_without_prefix(name)) for name in given
    )
    found: dict[str, str] = {}
    for name in given:
        if merged and not name.startswith(_PREFIXES):
            continue
        ours = _canonical_name(_without_prefix(name))
        if ours in found:
            raise ValueError(f"{source}: {found[ours]} and {name} are two names of one tensor")
        found[ours] = name
    return found


def _canonical_name(name: str) -> str:
    for pattern in (_BLOCK, _VLLM_BLOCK):
        if match := pattern.fullmatch(name):
            head, layer, kind = match.groups()
            return f"blocks.{int(head)}.{int(layer)}.{kind}"
    if match := _LM_HEAD.fullmatch(name) or _VLLM_LM_HEAD.fullmatch(name):
        return f"lm_heads.{int(match[1])}.weight"
    return "draft_to_target" if name == "token_map" else name


def _config(
    stored: Mapping[str, StoredTensor], names: Mapping[str, str], config: Fields, source: str
) -> MedusaConfig:
    """Derive the config from the names and shapes of the tensors."""
    blocks = [match.groups() for name in stored if (match := _OUR_BLOCK.fullmatch(name))]
    lm_heads = [name for name in stored if name.startswith("lm_heads.")]
    if not blocks or not lm_heads:
        raise ValueError(
            f"{source} holds Medusa heads without {'blocks' if not blocks else 'an lm_head'}"
        )
    for name in (f"blocks.{blocks[0][0]}.{blocks[0][1]}.weight", lm_heads[0]):
        if name in stored and (len(stored[name].shape) != 2 or 0 in stored[name].shape):
            raise ValueError(
                f"{source}: {names[name]} has shape {list(stored[name].shape)}; expected a matrix"
            )
    draft_vocab_size, hidden_size = stored[lm_heads[0]].shape
    num_heads = len({head for head, _, _ in blocks})
    # vLLM does not read a map of the whole vocabulary.
    vocab_size = config.integer("vocab_size") if "draft_to_target" in stored else draft_vocab_size
    return MedusaConfig(
        num_heads=num_heads,
        num_layers=len({layer for _, layer, _ in blocks}),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        bias=any(kind == "bias" for _, _, kind in blocks),
        shared_lm_head=config.flag("original_lm_head", False),
    )


def _token_map(stored: StoredTensor, config: MedusaConfig, source: str) -> Tensor:
    if stored.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{source}: token_map is {stored.dtype}; expected integers")
    targets = stored.read().long()
    bad = (targets < 0) | (targets >= config.vocab_size)
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(
            f"{source}: token_map[{index}] is {int(targets[index])}; expected an id below the target's "
            f"vocabulary size {config.vocab_size}"
        )
    if len(targets.unique()) != len(targets):
        raise ValueError(f"{source}: token_map contains a token twice")
    return targets


def save_medusa(
    heads: MedusaHeads,
    folder: str | Path,
    *,
    layout: Literal["medusa", "vllm"] = "medusa",
    target: PreTrainedModel | None = None,
    target_name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write Medusa heads to a folder.

    Args:
        heads: the heads to write.
        folder: created if it does not exist.
        layout: ``"medusa"`` writes ``medusa_lm_head.pt`` for the authors' code, ``"vllm"`` writes
            ``model.safetensors`` for vLLM.
        target, target_name, tokenizer: recorded in the config.json, as for
            :func:`~specdec_ext.heads.checkpoints.save_draft`.

    Returns:
        The folder.

    Raises:
        ValueError: for an option that the layout can't express.
    """
    if layout not in ("medusa", "vllm"):
        raise ValueError(f"layout={layout!r}; expected 'medusa' or 'vllm'")
    config = heads.config
    truncated = config.draft_vocab_size != config.vocab_size
    if layout == "medusa" and (not config.bias or config.shared_lm_head or truncated):
        raise ValueError(
            "layout='medusa' requires blocks with bias and an lm_head of the full vocabulary for each head; "
            "pass layout='vllm'"
        )
    tensors = {
        _file_name(name, config, layout): tensor.detach().cpu().clone().contiguous()
        for name, tensor in heads.tensors.items()
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "medusa":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    record = completed_record(heads.record, target, target_name, tokenizer)
    fields = _config_json(heads.config, record, layout)
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    return folder


def _file_name(name: str, config: MedusaConfig, layout: str) -> str:
    if name == "draft_to_target":
        return "token_map"
    if layout == "vllm":
        return re.sub(r"^(blocks\.\d+)\.", r"\1.layers.", name)
    if name.startswith("lm_heads."):
        return f"{name.split('.')[1]}.{config.num_layers}.weight"
    _, head, layer, kind = name.split(".")
    return f"{head}.{layer}.linear.{kind}"


def _config_json(config: MedusaConfig, record: HeadRecord, layout: str) -> dict[str, object]:
    recorded = {"base_model_name_or_path": record.target_name, "specdec_ext": own_section(record)}
    if layout == "medusa":
        return {
            **recorded,
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
        }
    return {
        **recorded,
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.shared_lm_head,
    }
