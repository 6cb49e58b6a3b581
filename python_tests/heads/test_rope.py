"""``rope_tables`` are transformers' own cosines and sines, for every rope type."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rope_cases import TYPES, config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_ext.heads.rope import rope_tables


@pytest.mark.parametrize("kind", TYPES)
def test_equal_transformers(kind):
    """Row p is what transformers uses when the token at position p is decoded."""
    head = config(kind)
    cosines, sines = rope_tables(head, 40)
    rope = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=head.hidden_size,
            num_attention_heads=head.num_heads,
            head_dim=head.head_dim,
            max_position_embeddings=head.max_positions,
            rope_parameters=dict(head.rope_parameters),
        )
    )
    half = head.head_dim // 2
    for position in range(40):
        expected = rope(torch.zeros(1), torch.tensor([[position]]))
        for table, whole in zip((cosines, sines), expected, strict=True):
            torch.testing.assert_close(table[position], whole[0, 0, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_hidden_size_does_not_count(kind):
    """Heads have a dimension of their own: the hidden size need not be a multiple of their number."""
    narrow = dataclasses.replace(config(kind), hidden_size=30)
    for given, expected in zip(rope_tables(narrow, 40), rope_tables(config(kind), 40), strict=True):
        assert torch.equal(given, expected)


@pytest.mark.parametrize("kind", TYPES)
def test_a_table_that_grows_keeps_its_rows(kind):
    for short, long in zip(
        rope_tables(config(kind), 20), rope_tables(config(kind), 50), strict=True
    ):
        assert torch.equal(short, long[:20])


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_partial_rotation(kind):
    """Half of the elements, with the frequencies of a head of half the size."""
    head = config(kind, partial_rotary_factor=0.5)
    cosines, _ = rope_tables(head, 10)
    assert cosines.shape == (10, head.head_dim // 4)
    factor = TYPES[kind].get("factor", 1.0)
    slowest = 500.0 ** (-1 + 4 / head.head_dim) / factor
    torch.testing.assert_close(cosines[7, -1], torch.tensor(7 * slowest).cos())


def test_float64_is_finer_and_no_other():
    single, double = (
        rope_tables(config("yarn"), 30, dtype) for dtype in (torch.float32, torch.float64)
    )
    assert double[0].dtype == torch.float64
    torch.testing.assert_close(single[0].double(), double[0], rtol=0, atol=1e-5)


def test_an_unknown_type():
    with pytest.raises(ValueError, match="rope_type 'spiral'; expected 'default' or one of"):
        rope_tables(config("spiral"), 4)
