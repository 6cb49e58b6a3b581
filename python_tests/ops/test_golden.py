"""The reference cases under golden/ are complete, unchanged and as their README describes them.

The tensors of a tree are compared with each other: the mask determines depths and paths, so a truncated file
or one of another case fails.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from helpers.drafters.golden_cases import CHAINS, TREES, load, parents_of
from helpers.places import GOLDEN

from specdec_ext import ops


def test_every_file_is_present_and_unchanged():
    listed = dict(
        reversed(line.split("  ", 1)) for line in (GOLDEN / "SHA256SUMS").read_text().splitlines()
    )
    found = {
        path.relative_to(GOLDEN).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in GOLDEN.glob("*/**/*")
        if path.is_file()
    }
    assert found == listed
    assert len(TREES) == 5 and len(CHAINS) == 3


@pytest.mark.parametrize("case", TREES)
def test_trees_are_consistent(case):
    tensors, weights, meta, config = load(case)
    hidden = config["hidden_size"]
    assert tensors["target_embed_tokens.weight"].shape == (config["vocab_size"], hidden)
    is_eagle3 = "d2t" in weights
    features = 3 * config.get("target_hidden_size", hidden) if is_eagle3 else hidden
    nodes, length = meta["total_tokens"], 0
    for number in range(meta["rounds"]):
        this = {
            name.removeprefix(f"round{number}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"round{number}.")
        }
        new_length = this["input_ids"].shape[1]
        # All tokens but the last one have features, in this round or an earlier one.
        assert this["features"].shape == (1, new_length - max(length, 1), features)
        length = new_length
        assert this["draft_tokens"].shape == (1, nodes)
        assert this["draft_tokens"][0, 0] == this["input_ids"][0, -1]
        mask, depths = this["tree_mask"][0, 0], this["tree_position_ids"]
        assert torch.equal(mask.sum(1) - 1, depths)
        assert torch.equal(mask.int() @ mask.int() > 0, mask), "an ancestor's ancestor is missing"
        paths = {tuple(unpadded(row)) for row in this["retrieve_indices"]}
        leaves = (mask.sum(0) == 1).nonzero().flatten().tolist()
        assert paths == {tuple(mask[leaf].nonzero().flatten().tolist()) for leaf in leaves}


@pytest.mark.parametrize("case", CHAINS)
def test_chains_are_consistent(case):
    tensors, weights, meta, config = load(case)
    hidden = config["transformer_layer_config"]["hidden_size"]
    layers = len(config["eagle_aux_hidden_state_layer_ids"])
    length = tensors["features"].shape[1]
    assert tensors["features"].shape == (1, length, layers * hidden)
    assert tensors["input_ids"].shape == (1, length + 1)
    assert tensors["draft_tokens"].shape == (1, meta["depth"])
    reachable = torch.arange(config["draft_vocab_size"]) + weights["d2t"]
    assert torch.isin(tensors["draft_tokens"], reachable).all()


@pytest.mark.parametrize("case", TREES)
def test_masks_are_those_of_the_eagle_authors(case, device):
    """Masks, positions and leaf paths equal those of the published reference implementation."""
    tensors, _, meta, _ = load(case)
    for number in range(meta["rounds"]):
        expected = tensors[f"round{number}.tree_mask"][0, 0]
        order = torch.arange(len(expected))
        parents = parents_of(expected)[None]
        shape = ops.tree_mask(parents.to(device), torch.tensor([0], device=device))
        bits = (shape.ancestors[0, :, order // 64].cpu() >> (order % 64)) & 1
        assert torch.equal(bits.bool(), expected)
        assert torch.equal(shape.positions[0].cpu(), tensors[f"round{number}.tree_position_ids"])
        leaves = shape.paths[0][shape.first_child[0] == -1].cpu()
        given = tensors[f"round{number}.retrieve_indices"]
        assert sorted(map(unpadded, leaves)) == sorted(map(unpadded, given))


def unpadded(path: torch.Tensor) -> list[int]:
    return path[path >= 0].tolist()
