"""Cache layers with a sliding window: what they show to attention, and what they can be cropped to.

``test_multiturn.py`` tests whole caches.
"""

import pytest
import torch
from helpers.models.tiny import tiny_model
from transformers import DynamicCache

from specdec_ext.models.cache.adoption import adopt_cache
from specdec_ext.models.cache.layers import RollbackLayer


def states(rows, slots, start=0):
    """Keys with the value of their slot, and values with its negative; 2 heads of dimension 3."""
    slot = torch.arange(start, start + slots, dtype=torch.float32)
    keys = slot[None, None, :, None].expand(rows, 2, slots, 3).contiguous()
    return keys, -keys


def test_window_returns_its_last_tokens_and_keeps_all():
    layer = RollbackLayer(window=4)
    layer.update(*states(1, 10))
    assert layer.get_mask_sizes(2) == (5, 7)
    keys, _ = layer.update(*states(1, 2, start=10))
    assert keys[0, 0, :, 0].tolist() == [7, 8, 9, 10, 11]
    layer.length, layer.slack = 8, 2
    keys, _ = layer.update(*states(1, 1, start=8))
    assert keys[0, 0, :, 0].tolist() == [3, 4, 5, 6, 7, 8]


def test_cropping_back_to_dropped_tokens_is_refused():
    config = tiny_model("mistral-window").config
    cache = DynamicCache(config=config)
    for index in range(3):
        cache.update(*states(1, 20), index)  # window 8: the first 13 are dropped
    adopt_cache(cache, config)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"had dropped its first 13 tokens .* Cropped to 18"):
        cache.crop(-2)
