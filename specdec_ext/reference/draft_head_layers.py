"""The layers of a draft head: the formulas of :mod:`specdec_ext.reference.draft_head`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_ext.heads.config import DraftHead, HeadConfig


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, rotation, softmax and logits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm (Zhang and Sennrich 2019), rounded as in Llama: to the dtype before multiplying the weight."""
    values = x.to(wide(x.dtype))
    return weight * (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): rotates element i with element ``half + i``, for i < ``half``.

    Args:
        x: ``[heads, n, head_dim]``.
        cosines, sines: ``[n, half]``.
    """
    half = cosines.shape[-1]
    first, second, rest = x.to(cosines.dtype).split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = [first * cosines - second * sines, second * cosines + first * sines, rest]
    return torch.cat(rotated, dim=-1).to(x.dtype)


class HeadFormulas(ABC):
    """The formulas of all members of the family, on tensors ``[..., n, width]``.

    A subclass defines where the tensors come from, how norms are rounded, and which elements are attended to.
    """

    config: HeadConfig

    @abstractmethod
    def _norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm with the weight of this name."""

    @abstractmethod
    def _linear(self, name: str, x: Tensor) -> Tensor:
        """Product with the matrix of this name, with its bias if it has one."""

    @abstractmethod
    def _attention(self, index: int, attended: Tensor, *context: Any) -> Tensor:
        """Attention of a layer, with o_proj: ``[..., n, hidden]``."""

    def combine(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The input h of layer 0, ``[..., n, hidden]``, from the target's features."""
        config = self.config
        if config.norm_before_fc:
            features = self._norm("input_norm", features)
        if config.fc_norm:
            parts = features.chunk(config.num_features, dim=-1)
            normed = [self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)]
            features = torch.cat(normed, dim=-1)
        return self._fc(embeddings, features)

    def feed_back(self, embeddings: Tensor, feedback: Tensor) -> Tensor:
        """The input h of layer 0 for drafted tokens; EAGLE-1 and MTP apply fc again."""
        return self._fc(embeddings, feedback) if self.config.feeds_fc else feedback

    def _fc(self, embeddings: Tensor, features: Tensor) -> Tensor:
        if not self.config.has_fc:
            return features
        if self.config.kind == "mtp":
            embeddings = self._norm("embedding_norm", embeddings)
            features = self._norm("hidden_norm", features)
        if self.config.feeds_fc:
            features = torch.cat([embeddings, features], dim=-1)
        return self._linear("fc", features)

    def layer(self, index: int, embeddings: Tensor, hidden: Tensor, *context: Any) -> Tensor:
        """The output of a layer; ``context`` is passed on to the attention."""
        name = f"layers.{index}"
        residual = attended = hidden
        if index > 0 or self.config.kind == "mtp":
            attended = self._norm(f"{name}.input_layernorm", hidden)
        elif self.config.kind == "eagle3":
            normed = self._norm(f"{name}.hidden_norm", hidden)
            embeddings = self._norm(f"{name}.input_layernorm", embeddings)
            attended = torch.cat([embeddings, normed], dim=-1)
            residual = normed if self.config.norm_before_residual else hidden
        hidden = residual + self._attention(index, attended, *context)
        x = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate, up = self._linear(f"{name}.mlp.gate_proj", x), self._linear(f"{name}.mlp.up_proj", x)
        return hidden + self._linear(f"{name}.mlp.down_proj", F.silu(gate) * up)

    def projections(self, index: int, attended: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer, ``[..., heads, n, head_dim]``, not rotated."""
        name = f"layers.{index}.self_attn"
        queries, keys, values = (
            self._linear(f"{name}.{part}_proj", attended).unflatten(-1, (-1, self.config.head_dim))
            for part in "qkv"
        )
        if self.config.qk_norm:
            queries = self._norm(f"{name}.q_norm", queries)
            keys = self._norm(f"{name}.k_norm", keys)
        return queries.transpose(-3, -2), keys.transpose(-3, -2), values.transpose(-3, -2)

    def output(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The input of lm_head and the feedback, from the output of the last layer."""
        normed = self._norm("norm", hidden) if self.config.kind != "eagle1" else hidden
        return normed, normed if self.config.norm_output else hidden


class HeadLayers(HeadFormulas):
    """The layers of a head with the cache of one row.

    Args:
        head: its config and tensors.
        cosines, sines: ``[positions, rotary / 2]``.
        keys, values: ``[layers, kv_heads, capacity, head_dim]``, written in place.
        first_position: position of slot 0; committed elements are at consecutive positions.
    """

    def __init__(
        self,
        head: DraftHead,
        cosines: Tensor,
        sines: Tensor,
        keys: Tensor,
        values: Tensor,
        first_position: int,
    ):
        self.config, self._tensors = head.config, head.tensors
        self._cosines, self._sines = cosines, sines
        self._keys, self._values = keys, values
        # Drafted nodes of the same depth share a position, which is set when they run.
        capacity = torch.arange(keys.shape[2], device=keys.device)
        self._slot_positions = first_position + capacity

    def forward(
        self, embeddings: Tensor, hidden: Tensor, slots: Tensor, positions: Tensor, seen: Tensor
    ) -> Tensor:
        """Return the output of the last layer, and write the keys and values of these elements to the cache.

        Args:
            embeddings, hidden: ``[n, hidden]``, e and h.
            slots: ``[n]`` int64, the slots for their keys and values.
            positions: ``[n]`` int64.
            seen: ``[n, used]`` bool, the slots that each element sees, before windows are applied, where
                ``used`` is the number of slots in use.
        """
        self._slot_positions[slots] = positions
        key_positions = self._slot_positions[: seen.shape[1]]
        for index in range(self.config.num_layers):
            window = self.config.sliding_windows[index]
            visible = seen
            if window is not None:
                visible = seen & (key_positions > positions[:, None] - window)
            hidden = self.layer(index, embeddings, hidden, slots, positions, visible)
        return hidden

    def logits(self, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """``(logits [n, draft_vocab], feedback [n, hidden])`` from outputs of the last layer."""
        normed, feedback = self.output(hidden)
        dtype = wide(hidden.dtype)
        return F.linear(normed.to(dtype), lm_head.to(dtype)) * self.config.logit_scale, feedback

    def _attention(self, index: int, attended: Tensor, *context: Any) -> Tensor:
        """Grouped-query attention over the visible slots."""
        slots, positions, visible = context
        config = self.config
        cosines, sines = self._cosines[positions], self._sines[positions]
        queries, keys, values = self.projections(index, attended)
        self._keys[index][:, slots] = rotate(keys, cosines, sines)
        self._values[index][:, slots] = values
        used, dtype = visible.shape[1], wide(attended.dtype)
        group = config.num_heads // config.num_kv_heads
        all_keys, all_values = (
            cache[index][:, :used].to(dtype).repeat_interleave(group, dim=0)
            for cache in (self._keys, self._values)
        )
        scores = rotate(queries, cosines, sines).to(dtype) @ all_keys.mT * config.head_dim**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        mixed = (weights @ all_values).to(attended.dtype)
        return self._linear(f"layers.{index}.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))
