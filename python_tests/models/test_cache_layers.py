"""Caches with more or fewer tensors than keys and values, or with other windows.

Claim: text is that of ``model.generate``, and the logits of a tree are those of each of its branches alone,
for sparse attention with index keys, compressed latents, layers that share keys and values, chunks, sinks,
and windows of the cache alone.
"""

import functools

import pytest
import torch
from helpers.checks.lossless import check_generated_text
from helpers.checks.tree_logits import check_tree_logits
from helpers.models import zoo
from helpers.models.tiny import CACHES, every_batch, prompts, tiny_model
from transformers import DynamicCache

import specdec_ext
from specdec_ext.models.cache.adoption import adopt_cache
from specdec_ext.models.cache.indexed import IndexedRollbackLayer
from specdec_ext.models.compat import NEEDS_MASK, DynamicIndexedLayer
from specdec_ext.models.passes.visibility import BlockVisibility, unpack_ancestors

# Behind its window Doge's text depends on the rounding of equal scores, so it is not speculated on.
TEXTS = [name for name in CACHES if name != "doge-keep"]
TREES = [name for name in CACHES if name != "minimax_m3"]


@pytest.mark.parametrize("name", TREES)
def test_logits_of_a_tree_are_those_of_its_branches(name):
    if NEEDS_MASK and name.startswith("doge"):
        pytest.skip("up to transformers 5.17 Doge attends to later tokens of a prompt")
    check_tree_logits(tiny_model(name), (12, 3, 9, 5))


@every_batch
@pytest.mark.parametrize("name", TEXTS)
def test_text_is_that_of_transformers(name, batch):
    check_generated_text(tiny_model(name), batch, new_tokens=12)


def test_blocks_of_slots_allow_chains_of_one_row():
    support = specdec_ext.supports(tiny_model("minimax_m3"))
    assert (support.chain, support.tree, support.batch) == (True, False, False)
    assert "cache slots" in support.reasons[0]


def test_git_is_decoded_by_transformers_in_batches():
    """With paddings its text in a batch is not that of its rows alone."""
    if NEEDS_MASK:
        pytest.skip("up to transformers 5.17 Git is decoded one token at a time, see compat")
    model = zoo.build("git")
    assert specdec_ext.supports(model).tree and not specdec_ext.supports(model).batch
    ids, mask = prompts((12, 3, 9))
    kwargs = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    with pytest.warns(UserWarning, match="without speculation in a batch of 3"):
        ours = specdec_ext.generate(model, ids, drafter="ngram", **kwargs)
    assert torch.equal(ours, model.generate(ids, **kwargs))


def index_keys(rows: int, slots: int) -> torch.Tensor:
    """Index keys of dimension 5 whose value is their slot."""
    slot = torch.arange(slots, dtype=torch.float32)
    return slot[None, :, None].expand(rows, slots, 5).contiguous()


def keys(rows: int, slots: int) -> torch.Tensor:
    return torch.ones(rows, 1, slots, 3)


def test_batch_operations_include_index_keys():
    layer = IndexedRollbackLayer()
    layer.update(keys(2, 4), keys(2, 4))
    layer.update_indexer(torch.arange(2.0)[:, None, None].expand(2, 4, 5))
    layer.indexer_position_ids = torch.arange(4).expand(3, 2, 4)
    layer.batch_repeat_interleave(2)
    assert layer.indexer_keys[:, 0, 0].tolist() == [0, 0, 1, 1]
    layer.batch_select_indices(torch.tensor([3, 0]))
    assert layer.indexer_keys[:, 0, 0].tolist() == [1, 0]
    layer.reorder_cache(torch.tensor([1, 0]))
    assert layer.indexer_keys[:, 0, 0].tolist() == [0, 1]
    assert layer.indexer_position_ids.shape == (3, 2, 4) and layer.keys.shape[0] == 2
    layer.crop(-1)
    assert layer.indexed == 3 and layer.indexer_position_ids.shape == (3, 2, 3)
    layer.reset()
    assert (layer.indexer_keys, layer.indexer_position_ids, layer.indexed) == (None, None, 0)


def test_filled_index_is_adopted():
    config = tiny_model("deepseek_v32").config
    cache = DynamicCache(config=config)
    assert type(cache.layers[0]) is DynamicIndexedLayer
    for layer in cache.layers:
        layer.update(keys(1, 6), keys(1, 6))
        layer.update_indexer(index_keys(1, 6))
    adopted = adopt_cache(cache, config).layers[0]
    assert isinstance(adopted, IndexedRollbackLayer)
    assert adopted.indexer_keys[0, :, 0].tolist() == list(range(6))


def test_second_turn_with_index_keys_is_that_of_transformers():
    model = tiny_model("deepseek_v32")
    ids, _ = prompts((9,))
    kwargs = dict(max_new_tokens=8, do_sample=False)

    def two_turns(generate, **how):
        cache = DynamicCache(config=model.config)
        first = generate(ids, past_key_values=cache, **kwargs, **how)
        longer = torch.cat([first, ids[:, :3]], dim=1)
        return generate(longer, past_key_values=cache, **kwargs, **how)

    ours = two_turns(functools.partial(specdec_ext.generate, model), drafter="ngram")
    assert torch.equal(ours, two_turns(model.generate))


def test_nodes_see_the_columns_of_their_text():
    """Row 1 ends a column before the block, so its text skips slot 4. Siblings skip each other."""
    block = BlockVisibility(
        committed=torch.ones(2, 5, dtype=torch.bool),
        block=unpack_ancestors(torch.tensor([[[1], [3], [5]]] * 2), 3),  # a root and two siblings
        query_positions=torch.empty(0),
        key_positions=torch.empty(0),
        columns=torch.tensor([[5, 6, 6], [4, 5, 5]]),
    )
    shown = {
        (row, node): slots.tolist()
        for rows, nodes, text in block.texts()
        for row, node, slots in zip(rows.tolist(), nodes.tolist(), text, strict=True)
    }
    assert shown == {
        (0, 0): [0, 1, 2, 3, 4, 5],
        (0, 1): [0, 1, 2, 3, 4, 5, 6],
        (0, 2): [0, 1, 2, 3, 4, 5, 7],
        (1, 0): [0, 1, 2, 3, 5],
        (1, 1): [0, 1, 2, 3, 5, 6],
        (1, 2): [0, 1, 2, 3, 5, 7],
    }
