"""Draft heads that the tests share: those of the golden cases, and random ones of every kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from specdec_ext.head import DraftHead, HeadConfig
from specdec_ext.reference.draft_head import draft_head
from specdec_ext.rope import rope_tables
from specdec_ext.tree import TreeConfig

_COMMON: dict[str, Any] = dict(
    kind="eagle3",
    hidden_size=24,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_layers=1,
    vocab_size=97,
    draft_vocab_size=61,
    target_hidden_size=32,
    num_features=3,
    feature_layers=(1, 2, -1),
)
_SHARED: dict[str, Any] = (
    dict(  # what a head without fc or of EAGLE-1 needs to fit a target of width 32
        hidden_size=32, draft_vocab_size=97, num_features=1, feature_layers=(-1,)
    )
)
# name -> fields of HeadConfig that differ; every option that changes a result is in one of them
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle1": {**_SHARED, "kind": "eagle1", "own_lm_head": False, "fc_bias": True},
    "eagle1-two-layers": {
        **_SHARED,
        "kind": "eagle1",
        "own_lm_head": False,
        "qkv_bias": True,
        "num_layers": 2,
        "sliding_windows": (None, None),
    },
    "eagle3": {"own_embedding": True},
    "eagle3.1": {"own_embedding": True, "fc_norm": True, "norm_output": True},
    "qk-norm-window": {
        "own_embedding": True,
        "qk_norm": True,
        "num_layers": 2,
        "sliding_windows": (5, None),
        "norm_before_residual": True,
        "norm_before_fc": True,
        "qkv_bias": True,
        "o_bias": True,
    },
    "no-fc": {**_SHARED, "has_fc": False, "logit_scale": 0.5},
    "p-eagle": {
        "own_embedding": True,
        "num_layers": 2,
        "sliding_windows": (None, None),
        "mask_token_id": 3,
        "rope_parameters": {
            "rope_type": "linear",
            "rope_theta": 500.0,
            "factor": 2.0,
            "partial_rotary_factor": 0.5,
        },
    },
}


def config(name: str, **changes: Any) -> HeadConfig:
    return HeadConfig(**{**_COMMON, **CONFIGS[name], **changes})


def random_head(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> DraftHead:
    """Weights scaled by fan-in, so that distributions are neither flat nor one-hot."""
    shape = config(name, **changes)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, size in shape.tensor_shapes().items():
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        if key == "draft_to_target":
            order = torch.randperm(shape.vocab_size, generator=generator)
            tensors[key] = order[: shape.draft_vocab_size].sort().values
        elif "norm" in key:
            tensors[key] = 1 + 0.2 * values
        elif key.endswith("bias"):
            tensors[key] = 0.3 * values
        else:
            tensors[key] = values * (2.0 if len(size) > 1 else 1.0) * size[-1] ** -0.5
    return DraftHead(shape, tensors).to("cpu", dtype)


@dataclasses.dataclass
class Run:
    """A head on a batch of rows with all that ``draft_head`` takes."""

    head: DraftHead
    embedding: Tensor
    lm_head: Tensor
    cosines: Tensor
    sines: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor
    positions: Tensor

    @classmethod
    def start(
        cls,
        head: DraftHead,
        rows: int,
        capacity: int = 128,
        embedding: Tensor | None = None,
        lm_head: Tensor | None = None,
        first_position: int = 0,
    ) -> Run:
        """Empty caches; where the head has no embedding or lm_head of its own, random ones unless given."""
        shape = head.config
        dtype = next(t.dtype for t in head.tensors.values() if t.is_floating_point())
        generator = torch.Generator().manual_seed(7)
        for name in ("embedding", "lm_head"):
            rows_of = shape.vocab_size if name == "embedding" else shape.draft_vocab_size
            values = torch.randn(rows_of, shape.hidden_size, generator=generator).to(dtype)
            key = "embed_tokens.weight" if name == "embedding" else "lm_head.weight"
            if name == "embedding":
                embedding = head.tensors.get(key, values if embedding is None else embedding)
            else:
                lm_head = head.tensors.get(key, values if lm_head is None else lm_head)
        size = shape.num_layers, rows, shape.num_kv_heads, capacity, shape.head_dim
        tables = rope_tables(
            shape,
            first_position + capacity,
            torch.float64 if dtype == torch.float64 else torch.float32,
        )
        keys, values = (torch.full(size, torch.nan, dtype=dtype) for _ in range(2))
        zeros = torch.zeros(rows, dtype=torch.long)
        return cls(head, embedding, lm_head, *tables, keys, values, zeros, zeros + first_position)

    def draft(
        self, tree: TreeConfig, tokens: Tensor, features: Tensor, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Extend by ``tokens [rows, new]``, ``features [rows, new, width]`` and draft."""
        rows, new = tokens.shape
        if counts is None:
            counts = torch.full((rows,), new)
        last = tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        drafted = draft_head(
            self.head,
            self.embedding,
            self.lm_head,
            self.cosines,
            self.sines,
            self.keys,
            self.values,
            tokens,
            features,
            counts,
            self.lengths,
            self.positions,
            last,
            tree,
        )
        self.lengths, self.positions = self.lengths + counts, self.positions + counts
        return drafted


def elements(head: DraftHead, rows: int, new: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ``(tokens [rows, new], features [rows, new, width])``."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(t.dtype for t in head.tensors.values() if t.is_floating_point())
    tokens = torch.randint(head.config.vocab_size, (rows, new), generator=generator)
    features = torch.randn(rows, new, head.config.feature_width, generator=generator)
    return tokens, features.to(dtype)


def golden_head(weights: dict[str, Tensor], raw: dict[str, Any]) -> DraftHead:
    """The head of a golden case."""
    layer = raw.get("transformer_layer_config", raw)
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in weights.items()
        if name not in ("t2d", "d2t")
    }
    if "d2t" in weights:
        tensors["draft_to_target"] = weights["d2t"] + torch.arange(len(weights["d2t"]))
    vocab, hidden, heads = (
        layer[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")
    )
    draft_vocab = raw.get("draft_vocab_size", vocab)
    if draft_vocab == vocab:
        tensors.pop("draft_to_target", None)
    is_eagle3 = "layers.0.hidden_norm.weight" in tensors
    shape = HeadConfig(
        kind="eagle3" if is_eagle3 else "eagle1",
        hidden_size=hidden,
        intermediate_size=layer["intermediate_size"],
        num_heads=heads,
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer.get("head_dim", hidden // heads),
        num_layers=layer["num_hidden_layers"],
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=raw.get("target_hidden_size") or hidden,
        num_features=3 if is_eagle3 else 1,
        rms_norm_eps=layer["rms_norm_eps"],
        sliding_windows=(None,) * layer["num_hidden_layers"],
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors,
        fc_bias="fc.bias" in tensors,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_before_fc="input_norm.weight" in tensors,
        norm_before_residual=raw.get("norm_before_residual", False),
        norm_output=raw.get("norm_output", False),
    )
    return DraftHead(shape, tensors)
