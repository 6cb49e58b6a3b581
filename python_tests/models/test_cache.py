"""``RollbackLayer`` and ``adopt_cache``: storage, growth, windows, reordering, adoption of HF's layers."""

import pytest
import torch
from helpers.models.tiny import tiny_model
from transformers import DynamicCache, StaticCache

from specdec_ext.models.cache.adoption import adopt_cache
from specdec_ext.models.cache.layers import RollbackLayer


def states(rows, slots, start=0):
    """Keys with the value of their slot, and values with its negative; 2 heads of dimension 3."""
    slot = torch.arange(start, start + slots, dtype=torch.float32)
    keys = slot[None, None, :, None].expand(rows, 2, slots, 3).contiguous()
    return keys, -keys


def test_appended_slots_replace_removed_ones():
    layer = RollbackLayer()
    layer.update(*states(2, 5))
    layer.length = 3
    keys, values = layer.update(*states(2, 2, start=30))
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 30, 31]
    assert values[1, 1, :, 2].tolist() == [0, -1, -2, -30, -31]
    assert layer.get_seq_length() == 5 and layer.keys.shape == (2, 2, 5, 3)


def test_growing_keeps_what_is_stored_and_new_slots_are_zero():
    layer = RollbackLayer()
    layer.reserve(4)
    layer.update(*states(1, 4))
    before = layer.key_buffer.shape[2]
    layer.update(*states(1, 400, start=4))
    assert before == 4 and layer.key_buffer.shape[2] >= 404
    assert layer.keys[0, 0, :, 0].tolist() == list(range(404))
    assert (layer.key_buffer[:, :, 404:] == 0).all()


def test_window_returns_its_last_tokens_and_keeps_all():
    layer = RollbackLayer(window=4)
    layer.update(*states(1, 10))
    assert layer.get_mask_sizes(2) == (5, 7)
    keys, _ = layer.update(*states(1, 2, start=10))
    assert keys[0, 0, :, 0].tolist() == [7, 8, 9, 10, 11]
    layer.length, layer.slack = 8, 2
    keys, _ = layer.update(*states(1, 1, start=8))
    assert keys[0, 0, :, 0].tolist() == [3, 4, 5, 6, 7, 8]


def test_fewer_rows_than_the_buffer_write_the_first_ones():
    layer = RollbackLayer()
    layer.update(*states(3, 2))
    keys, _ = layer.update(*states(2, 1, start=7))
    assert keys.shape[0] == 2 and layer.key_buffer[2, 0, 2, 0] == 0


def test_rows_can_be_moved():
    layer = RollbackLayer()
    keys = torch.arange(4.0)[:, None, None, None].expand(4, 1, 2, 3).contiguous()
    layer.update(keys, keys)
    layer.move_rows(torch.tensor([1, 3]), torch.tensor([3, 1]))
    assert layer.keys[:, 0, 0, 0].tolist() == [0, 3, 2, 1]


def test_cache_made_in_inference_mode_can_be_written_to_outside():
    layer = RollbackLayer()
    with torch.inference_mode():
        layer.update(*states(1, 3))
    layer.keys.add_(1)


def test_crop_and_reset_are_those_of_transformers():
    layer = RollbackLayer()
    layer.update(*states(1, 5))
    layer.crop(-2)
    assert layer.get_seq_length() == 3
    layer.crop(0)
    assert layer.get_seq_length() == 3
    with pytest.raises(ValueError, match="negative number"):
        layer.crop(2)
    layer.reset()
    assert layer.get_seq_length() == 0


def test_cropping_back_to_dropped_tokens_is_refused():
    config = tiny_model("mistral-window").config
    cache = DynamicCache(config=config)
    for index in range(3):
        cache.update(*states(1, 20), index)  # window 8: the first 13 are dropped
    adopt_cache(cache, config)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"had dropped its first 13 tokens .* Cropped to 18"):
        cache.crop(-2)


def test_batch_operations_of_the_cache_class_work():
    config = tiny_model("llama").config
    cache = adopt_cache(DynamicCache(config=config), config)
    for index in range(3):
        cache.update(*states(2, 4), index)
    cache.batch_repeat_interleave(2)
    assert cache.layers[0].keys.shape == (4, 2, 4, 3) and cache.get_seq_length() == 4
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[2].values.shape == (2, 2, 4, 3)


@pytest.mark.parametrize("with_config", [True, False])
def test_filled_cache_is_adopted(with_config):
    config = tiny_model("mistral-window").config
    cache = DynamicCache(config=config) if with_config else DynamicCache()
    for index in range(3):
        cache.update(*states(1, 20), index)
    assert adopt_cache(cache, config) is cache
    layer = cache.layers[1]
    assert layer.get_seq_length() == 20 and layer.window == (8 if with_config else None)
    assert layer.keys[0, 0, -7:, 0].tolist() == list(range(13, 20))


def test_adopting_twice_changes_nothing():
    config = tiny_model("llama").config
    cache = adopt_cache(None, config)
    layers = list(cache.layers)
    assert adopt_cache(cache, config).layers == layers


def test_other_cache_classes_are_refused():
    config = tiny_model("llama").config
    with pytest.raises(ValueError, match=r"StaticCache; expected a transformers\.DynamicCache"):
        adopt_cache(StaticCache(config=config, max_cache_len=16), config)
    with pytest.raises(ValueError, match="offloading"):
        adopt_cache(DynamicCache(config=config, offloading=True), config)
