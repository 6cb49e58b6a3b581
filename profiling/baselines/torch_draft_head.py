"""A fast EAGLE-3 head in plain PyTorch, the baseline of the draft benchmarks.

It has fused projections, PyTorch's rms_norm and attention, a preallocated cache, and one pass per level for
all nodes of a batch. Nothing waits for the device, so a draft can be captured in a CUDA graph. It supports
rows of equal length and heads with the default options of EAGLE-3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_ext import ops
from specdec_ext.heads.config import DraftHead
from specdec_ext.tree.config import TreeConfig


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate ``x [rows, heads, n, head_dim]`` by ``cosines, sines [n, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


class TorchHead:
    """A head with its cache.

    Args:
        head: a head with one layer.
        embedding, lm_head: as for :func:`specdec_ext.ops.draft_head`.
        cosines, sines: ``[positions, head_dim / 2]``.
        keys, values: ``[1, rows, kv_heads, capacity, head_dim]``.
    """

    def __init__(
        self,
        head: DraftHead,
        embedding: Tensor,
        lm_head: Tensor,
        cosines: Tensor,
        sines: Tensor,
        keys: Tensor,
        values: Tensor,
    ):
        config, tensors = head.config, head.tensors
        self.heads, self.kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.hidden, self.eps = (config.hidden_size,), config.rms_norm_eps
        layer = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
        self.qkv = torch.cat([layer[f"self_attn.{name}_proj.weight"] for name in "qkv"])
        self.gate_up = torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]])
        self.o, self.down, self.fc = (
            layer[f"{name}.weight"] for name in ("self_attn.o_proj", "mlp.down_proj", "fc")
        )
        self.input_norm, self.hidden_norm, self.post_norm, self.norm = (
            layer[f"{name}.weight"]
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        )
        self.embedding, self.lm_head = embedding, lm_head
        self.draft_to_target = tensors.get("draft_to_target")
        dtype = embedding.dtype
        self.cosines, self.sines = (torch.cat([t, t], dim=-1).to(dtype) for t in (cosines, sines))
        self.keys, self.values = keys[0], values[0]

    def layer(
        self, tokens: Tensor, hidden: Tensor, slot: int, positions: slice, mask: Tensor | None
    ) -> Tensor:
        """Compute elements ``[rows, n]`` and store them from ``slot`` on; ``mask [.., n, slots]``."""
        rows, n = tokens.shape
        embedded = F.rms_norm(
            F.embedding(tokens, self.embedding), self.hidden, self.input_norm, self.eps
        )
        attended = torch.cat(
            [embedded, F.rms_norm(hidden, self.hidden, self.hidden_norm, self.eps)], -1
        )
        qkv = F.linear(attended, self.qkv).view(rows, n, -1, self.head_dim).transpose(1, 2)
        queries, keys, values = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cosines, sines = self.cosines[positions], self.sines[positions]
        end = slot + n
        self.keys[:, :, slot:end] = rotate(keys, cosines, sines)
        self.values[:, :, slot:end] = values
        mixed = F.scaled_dot_product_attention(
            rotate(queries, cosines, sines),
            self.keys[:, :, :end],
            self.values[:, :, :end],
            attn_mask=mask,
            enable_gqa=True,
        )
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), self.o)
        gate, up = F.linear(
            F.rms_norm(hidden, self.hidden, self.post_norm, self.eps), self.gate_up
        ).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, self.down)

    def log_probs(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, self.hidden, self.norm, self.eps)
        return F.linear(normed, self.lm_head).float().log_softmax(-1)

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids if self.draft_to_target is None else self.draft_to_target[ids]

    def extend(self, tokens: Tensor, features: Tensor, length: int) -> Tensor:
        """Add new elements to the cache; returns the hidden state of the last one, ``[rows, 1, hidden]``."""
        new = tokens.shape[1]
        mask = None
        if new > 1:
            mask = torch.ones(new, length + new, dtype=torch.bool, device=tokens.device)
            mask = mask.tril(length)
        positions = slice(length, length + new)
        return self.layer(tokens, F.linear(features, self.fc), length, positions, mask)[:, -1:]

    @torch.inference_mode()
    def draft(
        self, tokens: Tensor, features: Tensor, length: int, tree: TreeConfig
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens and parents, ``[rows, nodes]``, when the cache holds ``length`` elements."""
        if tree.top_k > 1:
            return self._tree(tokens, features, length, tree)
        drafted = torch.cat([tokens[:, -1:], self._chain(tokens, features, length, tree.depth)], 1)
        return drafted, torch.arange(-1, tree.depth, device=tokens.device).expand_as(drafted)

    def _chain(self, tokens: Tensor, features: Tensor, length: int, depth: int) -> Tensor:
        """Draft a chain, ``[rows, depth]`` tokens."""
        hidden = self.extend(tokens, features, length)
        length += tokens.shape[1]
        drafted = []
        for level in range(depth):
            drafted.append(self.target_ids(self.log_probs(hidden).argmax(-1)))
            if level + 1 < depth:
                slot = length + level
                hidden = self.layer(drafted[-1], hidden, slot, slice(slot, slot + 1), None)
        return torch.cat(drafted, dim=1)

    def _tree(
        self, tokens: Tensor, features: Tensor, length: int, tree: TreeConfig
    ) -> tuple[Tensor, Tensor]:
        """Draft a dynamic tree (EAGLE-2): tokens and parents, ``[rows, nodes]``."""
        rows, k, device = len(tokens), tree.top_k, tokens.device
        assert tree.num_nodes is not None
        hidden = self.extend(tokens, features, length)
        length += tokens.shape[1]
        scores, ids = self.log_probs(hidden)[:, 0].topk(k)
        ids, parents = self.target_ids(ids), torch.full((rows, k), -1, device=device)
        all_scores, all_ids, all_parents = [scores], [ids], [parents]
        frontier, hidden = torch.arange(k, device=device).expand(rows, k), hidden.expand(-1, k, -1)
        seen = torch.ones(rows, k, length, dtype=torch.bool, device=device)
        itself = torch.eye(k, dtype=torch.bool, device=device).expand(rows, k, k)
        first = k
        for level in range(tree.depth - 1):
            seen = torch.cat([seen, itself], dim=2)
            slot, position = length + level * k, length + level
            positions = slice(position, position + 1)
            hidden = self.layer(ids, hidden, slot, positions, seen[:, None])
            best, children = self.log_probs(hidden).topk(k)
            best = (best + scores[..., None]).flatten(1)
            children = self.target_ids(children).flatten(1)
            all_scores.append(best)
            all_ids.append(children)
            all_parents.append(frontier.repeat_interleave(k, dim=1))
            scores, chosen = best.topk(k)
            ids, frontier, first = children.gather(1, chosen), first + chosen, first + k * k
            places = (chosen // k)[..., None]
            hidden = hidden.gather(1, places.expand(-1, -1, hidden.shape[2]))
            seen = seen.gather(1, places.expand(-1, -1, seen.shape[2]))
        drafted = ops.build_dynamic_tree(
            torch.cat(all_scores, 1),
            torch.cat(all_ids, 1),
            torch.cat(all_parents, 1),
            tokens[:, -1],
            tree.num_nodes,
        )
        return drafted.tokens, drafted.parents
