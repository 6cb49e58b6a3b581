"""``rope_tables`` are transformers' own cosines and sines, for every rope type."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.drafters.rope_cases import TYPES, config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_ext.heads.rope import rope_tables


@pytest.mark.parametrize("kind", TYPES)
def test_tables_equal_transformers(kind):
    """Row p holds the values that transformers uses for position p."""
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
def test_hidden_size_does_not_matter(kind):
    """head_dim is given: the hidden size need not be a multiple of the number of heads."""
    narrow = dataclasses.replace(config(kind), hidden_size=30)
    for given, expected in zip(rope_tables(narrow, 40), rope_tables(config(kind), 40), strict=True):
        assert torch.equal(given, expected)


@pytest.mark.parametrize("kind", TYPES)
def test_longer_table_begins_with_the_shorter_one(kind):
    tables = (rope_tables(config(kind), positions) for positions in (20, 50))
    for short, long in zip(*tables, strict=True):
        assert torch.equal(short, long[:20])


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_partial_rotation_has_the_frequencies_of_a_smaller_head(kind):
    """Half of the elements are rotated, with the frequencies of a head of half the size."""
    head = config(kind, partial_rotary_factor=0.5)
    cosines, _ = rope_tables(head, 10)
    assert cosines.shape == (10, head.head_dim // 4)
    factor = TYPES[kind].get("factor", 1.0)
    slowest = 500.0 ** (-1 + 4 / head.head_dim) / factor
    torch.testing.assert_close(cosines[7, -1], torch.tensor(7 * slowest).cos())


def test_float64_tables_are_close_to_float32():
    single = rope_tables(config("yarn"), 30, torch.float32)
    double = rope_tables(config("yarn"), 30, torch.float64)
    assert double[0].dtype == torch.float64
    torch.testing.assert_close(single[0].double(), double[0], rtol=0, atol=1e-5)


def test_unknown_type_is_refused():
    with pytest.raises(ValueError, match="rope_type 'spiral'; expected 'default' or one of"):
        rope_tables(config("spiral"), 4)
