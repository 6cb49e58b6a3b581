"""Compares the logits of trees with those of transformers, which decodes each branch alone."""

from __future__ import annotations

import copy
import inspect
import random

import torch
from helpers.models.tiny import VOCAB, prompts
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec_ext import DraftTree
from specdec_ext.models.compat import cache_argument
from specdec_ext.models.factory import make_target

TOLERANCE = 1e-4  # relative to the largest logit, or to 1; float32 sums in another order


def check_tree_logits(model: PreTrainedModel, lengths: tuple[int, ...], rounds: int = 2) -> None:
    """Score random trees in a left-padded batch, and commit a path of another length in every row.

    The logits of every node must be those of the padded row alone, decoded token by token up to that node.
    """
    rng = random.Random(len(lengths))
    ids, mask = prompts(lengths)
    target = make_target(model, ids.shape[1] + 32)
    target.prefill(ids, mask)
    rows = [_Row(model, ids[row : row + 1], mask[row : row + 1]) for row in range(len(lengths))]
    for _ in range(rounds):
        roots = torch.tensor([rng.randrange(1, VOCAB) for _ in lengths])
        tree = DraftTree.from_paths(roots, [_random_paths(rng) for _ in lengths])
        logits = target.forward(tree).logits
        path = torch.zeros_like(tree.tokens)
        accepted = []
        for i, row in enumerate(rows):
            branches = row.score(tree.tokens[i].tolist(), tree.parents[i].tolist())
            for node, branch in branches.items():
                bound = TOLERANCE * max(1, float(branch.logits.abs().max()))
                error = float((logits[i, node] - branch.logits).abs().max())
                assert error <= bound, f"row {i}, node {node}: logits are off by {error}"
            kept = rng.choice(list(branches.values()))
            path[i, : len(kept.nodes)] = torch.tensor(kept.nodes)
            accepted.append(len(kept.nodes) - 1)
            rows[i] = kept
        target.commit(path, torch.tensor(accepted))


def _random_paths(rng: random.Random) -> list[list[int]]:
    """Branches of three different tokens, which often share prefixes."""
    tokens = rng.sample(range(1, VOCAB), 3)
    return [[rng.choice(tokens) for _ in range(rng.randrange(1, 5))] for _ in range(4)]


class _Row:
    """One row, decoded as by ``model.generate``.

    Attributes:
        logits: ``[vocab]`` after its last token.
        nodes: the nodes of the last tree on the path to its last token.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor):
        self._model, self._mask = model, mask
        self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.nodes: list[int] = []
        self._run(ids)

    @torch.no_grad()
    def _run(self, ids: Tensor) -> None:
        taken = inspect.signature(self._model.forward).parameters
        inputs = {"attention_mask": self._mask, cache_argument(taken): self._cache}
        if "position_ids" in taken:
            positions = (self._mask.cumsum(1) - 1).clamp(min=0)
            inputs["position_ids"] = positions[:, -ids.shape[1] :]
        output = self._model(ids, use_cache=True, **inputs)
        self.logits = output.logits[0, -1]

    def _then(self, token: int, node: int) -> _Row:
        after = copy.copy(self)
        after._cache = copy.deepcopy(self._cache)
        after._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        after.nodes = [*self.nodes, node]
        after._run(torch.tensor([[token]]))
        return after

    def score(self, tokens: list[int], parents: list[int]) -> dict[int, _Row]:
        """The state of the row after every active node of a tree."""
        self.nodes = []
        branches: dict[int, _Row] = {-1: self}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent in branches:
                branches[node] = branches[parent]._then(token, node)
        del branches[-1]
        return branches
