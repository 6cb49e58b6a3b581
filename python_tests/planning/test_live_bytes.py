"""``LiveBytes``: the largest sum of tensors that are alive at the same time."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers.models.zoo import build
from transformers import AutoConfig

from specdec_ext.planning.sizes import live_bytes
from specdec_ext.planning.sizes.language_model import LanguageModel
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


@pytest.fixture
def derived(monkeypatch):
    """The operations that torch derived, by name, in their order."""
    names = []
    plain = LiveBytes._results

    @cache
    def recorded(func):
        def call(*args, **kwargs):
            names.append(func.__name__)
            return func(*args, **kwargs)

        call._schema = func._schema
        return call

    def results(self, func, args, kwargs):
        return plain(self, recorded(func), args, kwargs)

    monkeypatch.setattr(LiveBytes, "_results", results)
    return names


def test_an_operation_on_the_same_shapes_is_derived_once(derived):
    matrix = torch.zeros(SIDE, SIDE, device="meta")
    with LiveBytes([matrix]) as live:
        kept = [matrix * 2 for _ in range(4)]
        assert derived == ["mul.Tensor"] and live.peak == 4 * SIZE
        assert kept[3].shape == kept[0].shape and kept[3].stride() == kept[0].stride()
        kept += [matrix.T * 2, matrix.half() * 2, matrix[:8] * 2]
    assert derived.count("mul.Tensor") == 4


def test_equal_numbers_of_different_types_are_not_the_same():
    counts = torch.zeros(SIDE, dtype=torch.int64, device="meta")
    with LiveBytes():
        assert (counts * 1).dtype == torch.int64
        assert (counts * 1.0).dtype == torch.float32
        assert (counts * True).dtype == torch.int64


def test_values_are_not_lost():
    """Masks and positions may be computed on the CPU during a pass on the meta device."""
    with LiveBytes():
        for _ in range(2):
            assert (torch.arange(3, device="cpu") + 1).tolist() == [1, 2, 3]
            assert (torch.ones(3, device="cpu") * 2).tolist() == [2, 2, 2]


def test_views_and_changes_in_place_are_not_new(derived):
    matrix = torch.zeros(SIDE, SIDE, device="meta")
    with LiveBytes([matrix]) as live:
        for _ in range(3):
            # Returns the memory of its argument, but its schema does not tell.
            view = torch.ops.aten._unsafe_view(matrix, [SIDE * SIDE])
            assert matrix.add_(1) is matrix
            assert view.untyped_storage()._cdata == matrix.untyped_storage()._cdata
    assert live.peak == 0 and derived.count("add_.Tensor") == 3


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral", "qwen3_5_text", "falcon"])
def test_peaks_are_those_of_deriving_everything(name, monkeypatch):
    config = AutoConfig.for_model(**build(name).config.to_dict())
    sizes = [(1, 8), (2, 24), (3, 40)]
    once = [LanguageModel(config, torch.bfloat16).run(*each) for each in sizes]
    monkeypatch.setattr(live_bytes, "_makes_new_tensors", lambda func: False)
    assert [LanguageModel(config, torch.bfloat16).run(*each) for each in sizes] == once
