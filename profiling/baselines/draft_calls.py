"""Calls of the op ``draft_head`` as in decoding, with random weights, and the same drafts in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from cuda_kernels.draft_schedule import cache_bytes, needed_bytes, widths
from torch import Tensor

from baselines.heads import random_head
from baselines.torch_draft_head import TorchHead
from specdec_ext import ops
from specdec_ext.heads.config import DraftHead, HeadConfig
from specdec_ext.heads.rope import rope_tables
from specdec_ext.tree.config import TreeConfig

NEW = 3  # committed elements per draft and row: two accepted tokens and the bonus token


class RandomHead:
    """A random head and its target's embedding; packed for the op once per type of weights."""

    def __init__(self, config: HeadConfig, dtype: torch.dtype, device: torch.device | str):
        self.head: DraftHead = random_head(config, dtype, device)
        generator = torch.Generator(device).manual_seed(1)
        shape = config.vocab_size, config.hidden_size
        self.embedding = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        self._packed: dict[str, ops.PackedHead] = {}

    @property
    def config(self) -> HeadConfig:
        return self.head.config

    @property
    def lm_head(self) -> Tensor:
        return self.head.tensors["lm_head.weight"]

    def packed(self, weights: str = "same") -> ops.PackedHead:
        if weights not in self._packed:
            options = {} if weights == "same" else {"weights": weights}
            self._packed[weights] = ops.PackedHead.pack(
                self.head, self.embedding, self.lm_head, **options
            )
        return self._packed[weights]


@dataclass(frozen=True)
class DraftCall:
    """One draft for a batch; each row has ``context`` elements in the cache and NEW new ones."""

    random: RandomHead
    weights: str
    tree: TreeConfig
    context: int
    arguments: tuple[Any, ...]  # arguments of the op

    @classmethod
    def make(
        cls,
        random: RandomHead,
        tree: TreeConfig,
        context: int,
        rows: int = 1,
        weights: str = "same",
        seed: int = 0,
    ) -> DraftCall:
        """Make a call; the seed changes the inputs, not the weights."""
        config, like = random.config, random.embedding
        device, dtype = like.device, like.dtype
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        capacity = context + NEW + tree.depth * tree.top_k
        cosines, sines = (table.to(device) for table in rope_tables(config, capacity))
        cache = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
        tokens = torch.randint(config.vocab_size, (rows, NEW), generator=generator, device=device)
        lengths = torch.full((rows,), context, device=device)
        arguments = (
            random.packed(weights),
            cosines,
            sines,
            normal(*cache),
            normal(*cache),
            tokens,
            normal(rows, NEW, config.feature_width),
            torch.full((rows,), NEW, device=device),
            lengths,
            lengths.clone(),
            tokens[:, -1].clone(),
            tree,
        )
        return cls(random, weights, tree, context, arguments)

    def ours(self) -> ops.HeadDraft:
        return ops.draft_head(*self.arguments)

    def coupled(self) -> ops.HeadDraft:
        """The same call with noise in every row."""
        return ops.draft_head(*self.arguments, noise=self._noise)

    @cached_property
    def _noise(self) -> ops.DraftNoise:
        rows = torch.zeros_like(self.arguments[7])
        return ops.DraftNoise(rows + 1.0, rows + 5, rows)

    def theirs(self) -> tuple[Tensor, Tensor]:
        """Tokens and parents of the PyTorch modules, which always use the head's own weights."""
        tokens, features = self.arguments[5:7]
        return self._modules.draft(tokens, features, self.context, self.tree)

    @cached_property
    def _modules(self) -> TorchHead:
        head, embedding, lm_head = self.random.head, self.random.embedding, self.random.lm_head
        cosines, sines, keys, values = self.arguments[1:5]
        return TorchHead(head, embedding, lm_head, cosines, sines, keys.clone(), values.clone())

    @property
    def needed_bytes(self) -> int:
        """Bytes of the weights once per level and of the cache per row and level."""
        config, halves = self.random.config, self.random.embedding.element_size() // 2
        rows, depth = len(self.arguments[5]), len(widths(self.tree))
        cache = rows * depth * cache_bytes(config, self.context + NEW)
        weights = needed_bytes(config, self.tree, self.weights)
        return halves * cache + (halves if self.weights == "same" else 1) * weights


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """Capture ``run`` in a CUDA graph and return its replay; ``run`` must have been called before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
