"""Draft heads of every kind, a batch of rows to run them on, and a head trained for a tiny target."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from helpers.drafters import golden_cases
from helpers.drafters.checkpoint_cases import random_head
from helpers.places import GOLDEN
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_ext.heads.checkpoints import load_draft
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.rope import rope_tables
from specdec_ext.ops.couple_logits import DraftNoise
from specdec_ext.reference.draft_head import draft_head
from specdec_ext.reference.draft_head_layers import HeadLayers
from specdec_ext.tree.config import TreeConfig

# A head of width 24 for a target of width 32; the others have the target's.
_NARROW = {"hidden_size": 24, "own_embedding": True, "draft_vocab_size": 61}
_LAYERS = {"feature_layers": (0, 1, 2)}
# name -> (kind, options); each option occurs in one of them
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {"fc_bias": True}),
    "eagle1-two-layers": ("eagle1", {"qkv_bias": True, "num_layers": 2, "own_embedding": True}),
    "mtp": ("mtp", {"qk_norm": True}),
    "eagle3": ("eagle3", {**_LAYERS, **_NARROW}),
    "eagle3.1": ("eagle3", {**_LAYERS, "fc_norm": True, "norm_output": True}),
    "qk-norm-window": ("eagle3", {**_LAYERS, **_NARROW, "qk_norm": True, "num_layers": 2,
        "sliding_windows": (5, None), "norm_before_residual": True, "norm_before_fc": True, "qkv_bias": True,
        "o_bias": True}),
    "no-fc": ("eagle3", {"num_features": 1, "feature_layers": (-1,), "has_fc": False, "logit_scale": 0.5}),
    "p-eagle": ("eagle3", {**_LAYERS, "num_layers": 2, "mask_token_id": 3,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0,
        "partial_rotary_factor": 0.5}}),
}  # fmt: skip
TREES = {
    "chain": TreeConfig(depth=4),
    "static": TreeConfig(choices=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "dynamic": TreeConfig(depth=4, top_k=3, num_nodes=9),
}


def head_of(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any):
    family, known = KINDS[kind]
    return random_head(family, dtype, seed, **{**known, **options})


def dtype_of(head: DraftHead) -> torch.dtype:
    return next(tensor.dtype for tensor in head.tensors.values() if tensor.is_floating_point())


def elements(head: DraftHead, rows: int, new: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ``(tokens [rows, new], features [rows, new, width])``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(head.config.vocab_size, (rows, new), generator=generator)
    features = torch.randn(rows, new, head.config.feature_width, generator=generator)
    return tokens, features.to(dtype_of(head))


@dataclasses.dataclass
class Run:
    """Runs the specification on a batch of rows.

    Caches are filled with NaN at first, so that a read of an unwritten slot is detected. Drafts have
    ``noise``, if there is any.
    """

    head: DraftHead
    embedding: Tensor
    lm_head: Tensor
    cosines: Tensor
    sines: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor
    positions: Tensor
    noise: DraftNoise | None = None

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
        """Begin with empty caches. Weights of the target that the head shares are random by default."""
        config, dtype = head.config, dtype_of(head)
        generator = torch.Generator().manual_seed(7)
        others = []
        for count, given in ((config.vocab_size, embedding), (config.draft_vocab_size, lm_head)):
            random = torch.randn(count, config.hidden_size, generator=generator).to(dtype)
            others.append(random if given is None else given)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        size = config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim
        return cls(
            head,
            head.tensors.get("embed_tokens.weight", others[0]),
            head.tensors.get("lm_head.weight", others[1]),
            *rope_tables(config, first_position + capacity, wide),
            torch.full(size, torch.nan, dtype=dtype),
            torch.full(size, torch.nan, dtype=dtype),
            torch.zeros(rows, dtype=torch.long),
            torch.full((rows,), first_position),
        )

    def draft(
        self, tree: TreeConfig, tokens: Tensor, features: Tensor, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append ``tokens [rows, new]`` with their ``features [rows, new, width]``, then draft."""
        rows, new = tokens.shape
        if counts is None:
            counts = torch.full((rows,), new)
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
            tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0],
            tree,
            self.noise,
        )
        self.lengths, self.positions = self.lengths + counts, self.positions + counts
        return drafted


def golden_run(kind: type[Run], case: str, dtype: torch.dtype, **options: Any) -> Run:
    """A run of one row with the head and the target's weights of a golden case."""
    tensors = golden_cases.load(case)[0]
    embedding, lm_head = (
        tensors[name].to(dtype) if name in tensors else None
        for name in ("target_embed_tokens.weight", "target_lm_head.weight")
    )
    head = load_draft(GOLDEN / case / "draft", dtype=dtype)
    return kind.start(head, 1, capacity=200, embedding=embedding, lm_head=lm_head, **options)


def check_golden_trees(run: Run, case: str) -> None:
    """Draft all rounds of a case; the trees must be those of EAGLE's authors."""
    tensors, _, meta, _ = golden_cases.load(case)
    # Their depth counts the levels below the root's children.
    tree = TreeConfig(meta["depth"] + 1, meta["top_k"], meta["total_tokens"])
    for number in range(meta["rounds"]):
        features = tensors[f"round{number}.features"].to(run.embedding.dtype)
        text = tensors[f"round{number}.input_ids"]
        tokens, parents, scores = run.draft(tree, text[:, -features.shape[1] :], features)
        assert torch.equal(tokens, tensors[f"round{number}.draft_tokens"])
        expected = golden_cases.parents_of(tensors[f"round{number}.tree_mask"][0, 0])
        assert torch.equal(parents[0], expected)
        assert scores.isfinite().all() and scores.dtype == features.dtype


def check_golden_chain(run: Run, case: str) -> None:
    """Draft a case; the chain must be that of speculators."""
    tensors, _, meta, _ = golden_cases.load(case)
    features = tensors["features"].to(run.embedding.dtype)
    tokens, parents, _ = run.draft(TreeConfig(meta["depth"]), tensors["input_ids"][:, 1:], features)
    assert torch.equal(tokens[:, 1:], tensors["draft_tokens"])
    assert parents[0].tolist() == list(range(-1, meta["depth"]))


@functools.cache
def trained_head(model: PreTrainedModel, texts: tuple[tuple[int, ...], ...]) -> DraftHead:
    """Train an EAGLE-3 head on exactly these texts, so that its drafts are accepted.

    Training-time test (Li et al. 2025): at unrolled step i, the element at position t + i sees the committed
    elements up to t and its own earlier steps.
    """
    unrolled, steps = 3, 70
    head = head_of("eagle3", num_layers=1, draft_vocab_size=97, hidden_size=32)
    tensors = {name: nn.Parameter(tensor) for name, tensor in head.tensors.items()}
    head = dataclasses.replace(head, tensors=tensors)
    ids = torch.tensor(texts)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in head.config.feature_layers or ()], dim=-1)
    # All texts side by side; elements see only their own text.
    rows, length = len(texts), len(texts[0]) - unrolled - 1
    tables = rope_tables(head.config, length + unrolled)
    positions = torch.arange(length).repeat(rows)
    row = torch.arange(rows).repeat_interleave(length)
    causal = (row == row[:, None]) & (positions <= positions[:, None])
    order = torch.arange(rows * length)
    itself = torch.eye(len(order), dtype=torch.bool)
    size = 1, head.config.num_kv_heads, unrolled * len(order), head.config.head_dim
    optimizer = torch.optim.Adam(tensors.values(), lr=1e-2)
    for _ in range(steps):
        layers = HeadLayers(head, *tables, torch.zeros(size), torch.zeros(size), 0)
        loss = torch.zeros(())
        for step in range(unrolled):
            tokens = ids[:, 1 + step :][:, :length].flatten()
            embeddings = tensors["embed_tokens.weight"][tokens]
            if step == 0:
                hidden = layers.combine(embeddings, features[:, :length].flatten(0, 1))
            seen = torch.cat([causal] + [itself] * step, dim=1)
            slots = step * len(order) + order
            output = layers.forward(embeddings, hidden, slots, positions + step, seen)
            logits, hidden = layers.logits(output, tensors["lm_head.weight"])
            targets = ids[:, 2 + step :][:, :length].flatten()
            loss = loss + nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained = {name: tensor.detach() for name, tensor in tensors.items()}
    return dataclasses.replace(head, tensors=trained)
