"""Targets that read more ids than they write, or write more than they read: the text is the plain one.

What may be drafted is what the target reads, ``vocab_size(model)``; what it does not write is never accepted.
Config, embedding and output head may each have a size of their own (Moshi reads one id more than it writes).
"""

import copy

import pytest
import torch
from every_drafter import DRAFTERS
from lossless import DECODING, every_decoding
from tiny import VOCAB, tiny_model
from torch import nn

import specdec_ext
from specdec_ext.pretrained import vocab_size

MORE = 15
# A head is made for the sizes of its target, and checked (test_checkpoints_pair.py).
EVERY = {
    name: make
    for name, make in DRAFTERS.items()
    if name not in ("head", "p-eagle") and "medusa" not in name
}


def resized(reads: int, writes: int):
    """The tiny Llama with further ids at the end, random ones; it is as fond of them as of the others."""
    model = copy.deepcopy(tiny_model("llama"))
    for module, count in ((model.model.embed_tokens, reads), (model.lm_head, writes)):
        new = torch.randn(max(0, count - VOCAB), 32, generator=torch.Generator().manual_seed(1)) / 3
        module.weight = nn.Parameter(torch.cat([module.weight.detach()[:count], new]))
    return model


@pytest.mark.parametrize(
    "reads, writes", [(VOCAB + MORE, VOCAB), (VOCAB, VOCAB + MORE), (VOCAB, VOCAB - MORE)]
)
@every_decoding
@pytest.mark.parametrize("name", EVERY)
def test_the_text(name, decoding, reads, writes):
    model = resized(reads, writes)
    assert vocab_size(model) == reads
    ids = torch.randint(1, reads, (3, 9), generator=torch.Generator().manual_seed(2))
    ids[:, -3:] = ids[:, :3]  # something to copy, unwritable ids included
    kwargs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, **DECODING[decoding])
    if writes > reads:  # the text itself must stay readable
        kwargs["suppress_tokens"] = list(range(reads, writes))
    expected = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    rule = "rejection" if "sampled" in name else "match"
    actual = specdec_ext.generate(model, ids, drafter=EVERY[name](), verification=rule, **kwargs)
    assert actual.shape == expected.shape
    if (rule, decoding) != ("rejection", "sampled"):  # which gives another text of the same law
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["ngram", "suffix tree", "lookahead"])
def test_an_id_that_moshi_reads_and_never_writes(name):
    model = tiny_model("moshi-window")
    assert vocab_size(model) == model.config.vocab_size + 1
    ids = torch.tensor([[5, 6, VOCAB, 7, 5, 6, VOCAB, 7, 5, 6]])
    kwargs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    expected = model.generate(ids, **kwargs)
    assert torch.equal(
        specdec_ext.generate(model, ids, drafter=DRAFTERS[name](), **kwargs), expected
    )
