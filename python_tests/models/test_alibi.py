"""Attention with a bias or a cut-off by distance, where siblings have one distance and different slots.

Claim: Bloom, MPT and Falcon with ALiBi and GPT-Neo with local attention have the text of ``model.generate``,
and the logits of a tree are those of each of its branches alone, within 1e-4 in float32.
"""

import pytest
import torch
from helpers.checks.lossless import check_generated_text
from helpers.checks.tree_logits import check_tree_logits
from helpers.models.tiny import (
    BATCHES,
    BY_DISTANCE,
    ScriptedDrafter,
    every_batch,
    generated,
    prompts,
    random_tree,
    tiny_model,
)

import specdec_ext
from specdec_ext.models.families.alibi import alibi_of
from specdec_ext.models.families.local import local_attention_of


@pytest.mark.parametrize("lengths", [(7,), (12, 3, 9, 5)], ids=["one", "four-ragged"])
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_logits_of_a_tree_are_those_of_its_branches(name, lengths):
    check_tree_logits(tiny_model(name), lengths)


@every_batch
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_text_is_that_of_transformers(name, batch):
    check_generated_text(tiny_model(name), batch, new_tokens=16)


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi"])
def test_logits_of_a_tree_with_eager_attention(name):
    check_tree_logits(tiny_model(name, attn_implementation="eager"), (12, 3, 9, 5))


def test_texts_in_bfloat16_differ_only_at_near_ties():
    """Falcon's biases in bfloat16 are moved and not computed again."""
    model = tiny_model("falcon-alibi", dtype=torch.bfloat16)
    ids, mask = prompts(BATCHES["five-ragged"])
    kwargs = dict(attention_mask=mask, max_new_tokens=16, do_sample=False)
    plain = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    drafter = ScriptedDrafter(generated(plain, ids.shape[1]), random_tree)
    drafted = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
    for row in range(len(ids)):
        report = specdec_ext.compare_runs(model, plain[row], drafted[row], ids.shape[1])
        assert report.verdict in ("equal", "near-tie")


@pytest.mark.parametrize("name", ["mpt", "gpt_neo-window"])
def test_tree_may_have_more_slots_than_positions_are_left(name):
    model = tiny_model(name)
    end = getattr(model.config, "max_seq_len", None) or model.config.max_position_embeddings
    ids, mask = prompts((end - 8, end - 20))
    kwargs = dict(attention_mask=mask, max_length=end, do_sample=False)
    expected = model.generate(ids, **kwargs)

    def bushy(right, rng):
        return [right, *([rng.randrange(97)] for _ in range(12))]

    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), bushy)
    assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)


def test_paddings_between_tokens_do_not_matter():
    """Bloom and Falcon count tokens."""
    ids = torch.tensor([[5, 6, 0, 0, 7, 8, 0, 9], [1, 2, 3, 4, 5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1], [1] * 8])
    for name in ("bloom", "falcon-alibi"):
        model = tiny_model(name)
        kwargs = dict(attention_mask=mask, max_new_tokens=10, do_sample=False)
        expected = model.generate(ids, **kwargs)
        drafter = ScriptedDrafter(generated(expected, 8), random_tree)
        assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)


def test_other_models_have_no_bias_by_distance():
    for name in ("llama", "gpt2", "bart"):
        assert alibi_of(tiny_model(name)) == []
        assert local_attention_of(tiny_model(name)) == []


@pytest.mark.parametrize("name", BY_DISTANCE)
def test_modules_are_restored(name):
    model = tiny_model(name)
    ids, mask = prompts((7, 4))
    specdec_ext.generate(model, ids, attention_mask=mask, drafter="ngram", max_new_tokens=6)
    assert not any("forward" in vars(module) for module in model.modules())
