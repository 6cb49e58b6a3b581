"""The layers of a draft head on one row: the formulas of :mod:`specdec_ext.reference.draft_head`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_ext.heads.config import DraftHead


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


class HeadLayers:
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

    def combine(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The input h of layer 0, ``[n, hidden]``, from the target's features ``[n, feature_width]``."""
        config = self.config
        if config.norm_before_fc:
            features = self._norm("input_norm.weight", features)
        if config.fc_norm:
            parts = features.chunk(config.num_features, dim=-1)
            features = torch.cat(
                [self._norm(f"fc_norm.{i}.weight", part) for i, part in enumerate(parts)], dim=-1
            )
        return self._fc(embeddings, features)

    def feed_back(self, embeddings: Tensor, feedback: Tensor) -> Tensor:
        """The input h of layer 0, ``[n, hidden]``, for drafted tokens; only EAGLE-1 applies fc again."""
        return self._fc(embeddings, feedback) if self.config.kind == "eagle1" else feedback

    def _fc(self, embeddings: Tensor, features: Tensor) -> Tensor:
        if not self.config.has_fc:
            return features
        if self.config.kind == "eagle1":
            features = torch.cat([embeddings, features], dim=-1)
        return self._linear("fc", features)

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
            residual, attended = self._attention_input(index, embeddings, hidden)
            window = self.config.sliding_windows[index]
            visible = seen
            if window is not None:
                visible = seen & (key_positions > positions[:, None] - window)
            hidden = residual + self._attention(index, attended, slots, positions, visible)
            normed = self._norm(f"layers.{index}.post_attention_layernorm.weight", hidden)
            hidden = hidden + self._mlp(f"layers.{index}.mlp", normed)
        return hidden

    def output(self, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """``(logits [n, draft_vocab], feedback [n, hidden])`` from outputs of the last layer."""
        config = self.config
        normed = self._norm("norm.weight", hidden) if config.kind == "eagle3" else hidden
        dtype = wide(hidden.dtype)
        logits = F.linear(normed.to(dtype), lm_head.to(dtype)) * config.logit_scale
        return logits, normed if config.norm_output else hidden

    def _attention_input(
        self, index: int, embeddings: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``(residual, input of attention)`` of a layer."""
        first, name = index == 0, f"layers.{index}"
        if first and self.config.kind == "eagle1":
            return hidden, hidden
        if not first:
            return hidden, self._norm(f"{name}.input_layernorm.weight", hidden)
        normed = self._norm(f"{name}.hidden_norm.weight", hidden)
        embeddings = self._norm(f"{name}.input_layernorm.weight", embeddings)
        residual = normed if self.config.norm_before_residual else hidden
        return residual, torch.cat([embeddings, normed], dim=-1)

    def _attention(
        self, index: int, attended: Tensor, slots: Tensor, positions: Tensor, visible: Tensor
    ) -> Tensor:
        """Grouped-query attention over the visible slots, with o_proj: ``[n, hidden]``."""
        config, name = self.config, f"layers.{index}.self_attn"
        cosines, sines = self._cosines[positions], self._sines[positions]
        queries, keys, values = (
            self._linear(f"{name}.{part}_proj", attended)
            .unflatten(-1, (-1, config.head_dim))
            .transpose(0, 1)
            for part in "qkv"
        )
        if config.qk_norm:
            queries = self._norm(f"{name}.q_norm.weight", queries)
            keys = self._norm(f"{name}.k_norm.weight", keys)
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
        return self._linear(f"{name}.o_proj", mixed.transpose(0, 1).flatten(1))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x)
        return self._linear(f"{name}.down_proj", F.silu(gate) * up)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._tensors[name], self.config.rms_norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))
