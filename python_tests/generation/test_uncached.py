"""``use_cache=False``: the whole text runs in every pass, and drafts with it.

The models here prepare their inputs in ways of their own; several ask for the last logits alone, where every
draft needs the logits before it.
"""

import pytest
import torch
from helpers.models import zoo
from helpers.models.tiny import ScriptedDrafter, generated, noisy_chain, random_tree

import specdec_ext

HYBRIDS = ["bamba", "falcon_h1", "nemotron_h", "zamba", "zamba2"]
OTHERS = ["llama", "gpt2", "jamba", "lfm2", "openai-gpt"]


@pytest.mark.parametrize("shape", [noisy_chain, random_tree])
@pytest.mark.parametrize("name", [*HYBRIDS, *OTHERS])
def test_the_text(name, shape):
    model, ids = zoo.build(name), torch.tensor([[5, 6, 7, 8] * 3])
    kwargs = dict(attention_mask=torch.ones_like(ids), use_cache=False, max_new_tokens=12)
    kwargs["do_sample"] = False
    expected = model.generate(ids, **kwargs)
    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
    output = specdec_ext.generate(
        model, ids, drafter=drafter, speculation="fixed", return_dict_in_generate=True, **kwargs
    )
    assert torch.equal(output.sequences, expected)
    assert output.speculation_stats.mean_acceptance_length > 1


def test_attention_that_sorts_the_whole_text_is_not_speculated_on():
    """Reformer's buckets: which tokens share one depends on what is behind them."""
    model, ids = zoo.build("reformer"), torch.tensor([[5, 6, 7, 8] * 3])
    kwargs = dict(use_cache=False, max_new_tokens=10, do_sample=False)
    with pytest.raises(ValueError, match="its hashing attention sorts all tokens of the text"):
        specdec_ext.generate(model, ids, drafter="ngram", **kwargs)
    with pytest.warns(UserWarning, match="is decoded without speculation.*hashing attention"):
        actual = specdec_ext.generate(model, ids, **kwargs)
    assert torch.equal(actual, model.generate(ids, **kwargs))
