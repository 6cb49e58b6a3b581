"""``LiveBytes``: the largest sum of tensors that are alive at the same time."""

from __future__ import annotations

import torch

from specdec_ext.planning.sizes.live_bytes import LiveBytes

SIDE = 64
SIZE = SIDE * SIDE * 4


def test_peak_counts_what_is_alive_together():
    weight = torch.zeros(SIDE, SIDE, device="meta")
    with LiveBytes([weight]) as live:
        first = weight @ weight.T
        assert live.peak == SIZE  # the transposed weight is a view
        second = first * 2
        assert live.peak == 2 * SIZE
        del first
        third = second + 1
        assert live.peak == 2 * SIZE
        third.add_(second)
        view = third[:8]
        assert live.peak == 2 * SIZE
        _ = view.contiguous(), third.clone()
    assert live.peak == 3 * SIZE


def test_tensors_that_are_not_known_count_through_their_views():
    weight = torch.zeros(SIDE, SIDE, device="meta")
    with LiveBytes() as live:
        _ = weight.T
    assert live.peak == SIZE
