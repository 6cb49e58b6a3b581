"""Targets whose embedding has more or fewer ids than their output head have the text of plain decoding.

Ids of the embedding, ``vocab_size(model)``, may be drafted; ids without logits are never accepted. Moshi's
embedding has one id more than its head.
"""

import copy

import pytest
import torch
from helpers.checks.lossless import DECODING, every_decoding
from helpers.drafters.every_drafter import DRAFTERS
from helpers.drafters.mtp_cases import mtp_model
from helpers.models.tiny import VOCAB, tiny_model
from torch import nn

import specdec_ext
from specdec_ext import MtpHeads
from specdec_ext.pretrained import vocab_size

MORE = 15
# A head must fit the sizes of its target (test_checkpoints_pair.py).
EVERY = {
    name: make
    for name, make in DRAFTERS.items()
    if name not in ("head", "p-eagle") and "medusa" not in name
}


def resized(reads: int, writes: int):
    """The tiny Llama with further random ids at the end, which are as likely as the others."""
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
def test_text_is_that_of_plain_decoding(name, decoding, reads, writes):
    model = resized(reads, writes)
    assert vocab_size(model) == reads
    ids = torch.randint(1, reads, (3, 9), generator=torch.Generator().manual_seed(2))
    ids[:, -3:] = ids[:, :3]  # something to copy, ids without logits included
    kwargs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, **DECODING[decoding])
    if writes > reads:  # ids without an embedding can't be read
        kwargs["suppress_tokens"] = list(range(reads, writes))
    expected = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    rule = "rejection" if "sampled" in name else "match"
    drafter = MtpHeads(model, mtp_model(model, 1)) if name == "mtp" else EVERY[name]()
    actual = specdec_ext.generate(model, ids, drafter=drafter, verification=rule, **kwargs)
    assert actual.shape == expected.shape
    if (rule, decoding) != ("rejection", "sampled"):  # another text of the same distribution
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["ngram", "suffix tree", "lookahead"])
def test_id_without_logits_is_never_accepted(name):
    model = tiny_model("moshi-window")
    assert vocab_size(model) == model.config.vocab_size + 1
    ids = torch.tensor([[5, 6, VOCAB, 7, 5, 6, VOCAB, 7, 5, 6]])
    kwargs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    expected = model.generate(ids, **kwargs)
    actual = specdec_ext.generate(model, ids, drafter=DRAFTERS[name](), **kwargs)
    assert torch.equal(actual, expected)
