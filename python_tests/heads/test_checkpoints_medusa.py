"""Medusa checkpoints: every layout read and written back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.drafters.medusa_cases import random_heads
from safetensors.torch import save_file
from torch import Tensor

from specdec_ext import MedusaHeads
from specdec_ext.heads.checkpoints.medusa import looks_like_medusa, read_medusa, save_medusa
from specdec_ext.heads.checkpoints.storage.files import open_checkpoint
from specdec_ext.heads.record import HeadRecord


def read(folder: Path, dtype: torch.dtype | None = None) -> MedusaHeads:
    checkpoint = open_checkpoint(folder)
    assert looks_like_medusa(checkpoint.tensors)
    return read_medusa(checkpoint.tensors, checkpoint.config, checkpoint.source, dtype)


def write(folder: Path, tensors: dict[str, Tensor], **config) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def author_tensors(
    heads: int = 2, layers: int = 1, hidden: int = 4, vocab: int = 6
) -> dict[str, Tensor]:
    """What the authors' training writes; the layers of a head are one module, saved under each name."""
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.full((hidden, hidden), 1.0 + head)
            tensors[f"{head}.{layer}.linear.bias"] = torch.full((hidden,), 2.0 + head)
        tensors[f"{head}.{layers}.weight"] = torch.full((vocab, hidden), 3.0 + head)
    return tensors


def assert_equal(a: MedusaHeads, b: MedusaHeads) -> None:
    assert a.config == b.config and a.tensors.keys() == b.tensors.keys()
    assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_authors_layout_is_read(tmp_path, layers, prefix):
    """The number of heads is that of the tensors: like published ones, the config gives another number."""
    tensors = {prefix + name: each for name, each in author_tensors(3, layers).items()}
    if prefix:
        tensors |= {
            "model.embed_tokens.weight": torch.zeros(6, 4),
            "lm_head.weight": torch.ones(6, 4),
        }
    heads = read(write(tmp_path, tensors, medusa_num_heads=2, base_model_name_or_path="org/target"))
    assert (heads.config.num_heads, heads.config.num_layers) == (3, layers)
    assert (heads.config.hidden_size, heads.config.vocab_size, heads.config.bias) == (4, 6, True)
    assert heads.record.target_name == "org/target"
    for head in range(3):
        assert (heads.tensors[f"lm_heads.{head}.weight"] == 3.0 + head).all()
        for layer in range(layers):
            assert (heads.tensors[f"blocks.{head}.{layer}.weight"] == 1.0 + head).all()
            assert (heads.tensors[f"blocks.{head}.{layer}.bias"] == 2.0 + head).all()


def test_authors_torch_file_is_read(tmp_path):
    torch.save(author_tensors(), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text("{}")
    assert read(tmp_path).config.num_heads == 2


def test_layout_of_vllm_is_read(tmp_path):
    tensors = {
        "blocks.0.layers.0.weight": torch.zeros(4, 4),
        "blocks.1.layers.0.weight": torch.ones(4, 4),
        "lm_heads.0.weight": torch.ones(3, 4),
        "token_map": torch.tensor([5, 0, 2]),
    }
    sizes = dict(vocab_size=6, truncated_vocab_size=3)
    heads = read(write(tmp_path, tensors, original_lm_head=True, **sizes))
    config = heads.config
    assert (config.num_heads, config.bias, config.shared_lm_head) == (2, False, True)
    assert (config.vocab_size, config.draft_vocab_size) == (6, 3)
    assert heads.tensors["draft_to_target"].tolist() == [5, 0, 2]


def test_map_of_the_whole_vocabulary_is_ignored(tmp_path):
    tensors = author_tensors() | {"token_map": torch.arange(6)}
    assert "draft_to_target" not in read(write(tmp_path, tensors, vocab_size=6)).tensors


@pytest.mark.parametrize("layout", ["medusa", "vllm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_written_heads_are_read_back_equal(tmp_path, layout, dtype):
    heads = random_heads(num_layers=2).to("cpu", dtype)
    heads = MedusaHeads(heads.config, heads.tensors, record=HeadRecord(target_name="org/target"))
    again = read(save_medusa(heads, tmp_path / "new" / "folder", layout=layout))
    assert_equal(again, heads)
    assert again.record.target_name == "org/target"
    double = read(tmp_path / "new" / "folder", torch.float64)
    assert double.tensors["lm_heads.0.weight"].dtype == torch.float64


@pytest.mark.parametrize(
    "changes",
    [{"bias": False}, {"shared_lm_head": True}, {"vocab_size": 97, "draft_vocab_size": 11}],
    ids=["no bias", "one lm_head", "truncated"],
)
def test_options_of_vllms_layout_need_it(tmp_path, changes):
    heads = random_heads(**changes)
    assert_equal(read(save_medusa(heads, tmp_path, layout="vllm")), heads)
    with pytest.raises(ValueError, match="pass layout='vllm'"):
        save_medusa(heads, tmp_path)


def test_other_tensor_names_are_not_taken_for_medusa():
    eagle = ["fc.weight", "layers.0.self_attn.q_proj.weight", "lm_head.weight"]
    for names in (eagle, ["model.layers.0.mlp.linear.weight", "0.weight"], []):
        assert not looks_like_medusa(names)


# ---------------------------------------------------------------- refused


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if key != name}


DAMAGED = {
    "no lm_head": (lambda t: without(t, "1.1.weight"), r"lacks lm_heads.1.weight"),
    "no lm_head at all": (lambda t: {k: v for k, v in t.items() if "linear" in k},
        "holds Medusa heads without an lm_head"),
    "a missing bias": (lambda t: without(t, "0.0.linear.bias"), r"lacks blocks.0.0.bias"),
    "a gap between heads": (lambda t: {name.replace("1.", "2.", 1): each for name, each in t.items()},
        "lacks blocks.1.0.bias"),
    "a misspelt name": (lambda t: t | {"blocks.0.layers.0.extra.weight": torch.zeros(4, 4)},
        "its other tensors are blocks.0.layers.0.extra.weight"),
    "no vocabulary": (lambda t: t | {"0.1.weight": torch.zeros(0, 4), "1.1.weight": torch.zeros(0, 4)},
        r"0.1.weight has shape \[0, 4\]; expected a matrix"),
    "surplus": (lambda t: t | {"extra": torch.zeros(1)}, "its other tensors are extra"),
    "wrong shape": (lambda t: t | {"1.0.linear.weight": torch.zeros(4, 5)},
        r"1.0.linear.weight has shape \[4, 5\]; the other tensors require \[4, 4\]"),
    "a vector for a matrix": (lambda t: t | {"0.1.weight": torch.zeros(24)},
        r"0.1.weight has shape \[24\]; expected a matrix"),
    "other vocabularies": (lambda t: t | {"1.1.weight": torch.zeros(7, 4)},
        r"1.1.weight has shape \[7, 4\]; the other tensors require \[6, 4\]"),
    "NaN": (lambda t: t | {"0.1.weight": torch.full((6, 4), float("nan"))},
        "0.1.weight holds NaN or infinity"),
    "integers": (lambda t: t | {"0.1.weight": torch.zeros(6, 4).long()}, "expected a floating-point"),
    "mixed types": (lambda t: t | {"0.1.weight": torch.zeros(6, 4).half()}, "mixes dtypes"),
    "two spellings": (lambda t: t | {"blocks.0.layers.0.weight": torch.zeros(4, 4)},
        "two names of one tensor"),
    "map out of range": (lambda t: t | {"token_map": torch.arange(6) + 3}, r"token_map\[5\] is 8; .* 8"),
    "map with a token twice": (lambda t: t | {"token_map": torch.zeros(6).long()}, "contains a token twice"),
    "map of numbers": (lambda t: t | {"token_map": torch.zeros(6)}, "token_map is torch.float32"),
    "map too short": (lambda t: t | {"token_map": torch.arange(5)}, r"token_map has shape \[5\]; .* \[6\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED.values(), ids=DAMAGED.keys())
def test_error_names_the_damaged_part(tmp_path, case):
    damage, message = case
    write(tmp_path, damage(author_tensors()), vocab_size=8)
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_map_needs_vocab_size(tmp_path):
    write(tmp_path, author_tensors() | {"token_map": torch.arange(6)})
    with pytest.raises(ValueError, match="has no vocab_size"):
        read(tmp_path)


def test_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="layout='eagle'; expected 'medusa' or 'vllm'"):
        save_medusa(random_heads(), tmp_path, layout="eagle")
