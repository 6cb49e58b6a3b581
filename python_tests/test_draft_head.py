"""The specification of ``draft_head`` equals the drafts of the heads' authors, and every option counts."""

from __future__ import annotations

import pytest
import torch
from head_cases import Run, golden_head
from test_golden import CHAINS, TREES, load

from specdec_ext.tree import TreeConfig

# The weights stored with this case do not give its drafts: EAGLE-1 copies the target's embedding, and the two
# that are stored differ.
INCOMPLETE = "eagle1_nobias"
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("case", [name for name in TREES if name != INCOMPLETE])
def test_trees_of_the_eagle_authors(case, dtype):
    tensors, weights, meta, raw = load(case)
    run = Run.start(
        golden_head(weights, raw).to("cpu", dtype),
        rows=1,
        capacity=200,
        embedding=tensors["target_embed_tokens.weight"].to(dtype),
        lm_head=tensors["target_lm_head.weight"].to(dtype) if "eagle1" in case else None,
    )
    # Their depth counts the levels below the root's children.
    tree = TreeConfig(meta["depth"] + 1, meta["top_k"], meta["total_tokens"])
    for number in range(meta["rounds"]):
        features = tensors[f"round{number}.features"].to(dtype)
        text = tensors[f"round{number}.input_ids"]
        tokens, parents, scores = run.draft(tree, text[:, -features.shape[1] :], features)
        assert torch.equal(tokens, tensors[f"round{number}.draft_tokens"])
        ancestors = tensors[f"round{number}.tree_mask"][0, 0]
        order = torch.arange(len(ancestors))
        strict = ancestors & (order < order[:, None])
        assert torch.equal(parents[0], torch.where(strict, order, -1).amax(dim=1))
        assert scores.isfinite().all() and scores.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("case", CHAINS)
def test_chains_of_speculators(case, dtype):
    tensors, weights, meta, raw = load(case)
    run = Run.start(golden_head(weights, raw).to("cpu", dtype), rows=1)
    features = tensors["features"].to(dtype)
    tokens, parents, _ = run.draft(TreeConfig(meta["depth"]), tensors["input_ids"][:, 1:], features)
    assert torch.equal(tokens[:, 1:], tensors["draft_tokens"])
    assert parents[0].tolist() == list(range(-1, meta["depth"]))
