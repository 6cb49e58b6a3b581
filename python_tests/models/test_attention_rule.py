"""``tree_attention`` replaces sdpa where the mask has a rule that the op computes, and only there."""

import functools

import pytest
import torch
from helpers.models.tiny import VOCAB, generated, prompts, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import specdec_ext
from specdec_ext.models.passes import attention
from specdec_ext.models.passes.masks import causal_window


@pytest.fixture
def served(monkeypatch, by_modules):
    """The shapes of queries for which the op computes attention, with models run by their modules."""
    counter = []
    original = attention.TreeBlock.attend

    def attend(block, query, *rest):
        counter.append(query.shape)
        return original(block, query, *rest)

    monkeypatch.setattr(attention.TreeBlock, "attend", attend)
    return counter


def test_causal_rules_have_a_window():
    assert causal_window(causal_mask_function) == 0
    assert causal_window(sliding_window_causal_mask_function(7)) == 7


@pytest.mark.parametrize(
    "rule",
    [
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(7),
        chunked_causal_mask_function(4, torch.zeros(1)),
        or_masks(causal_mask_function, bidirectional_mask_function),
        and_masks(causal_mask_function, sliding_window_causal_mask_function(7)),
        and_masks(causal_mask_function, causal_mask_function),
        lambda batch, head, query, key: key <= query,
    ],
    ids=["bidirectional", "bidirectional-window", "chunked", "or", "nested", "causal-twice", "own"],
)
def test_other_rules_keep_their_mask(rule):
    assert causal_window(rule) is None


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_op_computes_every_layer_of_every_pass_after_the_prompt(served, drafter):
    model = tiny_model("mistral-window")
    kwargs = dict(max_new_tokens=12, do_sample=False, speculation="fixed")
    kwargs |= dict(drafter=drafter, return_dict_in_generate=True)
    out = specdec_ext.generate(model, prompts((9,))[0], **kwargs)
    passes = out.speculation_stats.steps
    assert len(served) == model.config.num_hidden_layers * passes


def text(model, ids, mask, **kwargs):
    """Our text with keywords, else that of transformers."""
    generate = functools.partial(specdec_ext.generate, model) if kwargs else model.generate
    kwargs |= dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    sequences = generate(ids, **kwargs)
    return generated(sequences, ids.shape[1])


def test_eager_attention_keeps_its_own(served):
    model = tiny_model("llama", "eager")
    ids, mask = prompts((9, 4))
    assert text(model, ids, mask, drafter="ngram") == text(model, ids, mask)
    assert not served


@pytest.mark.parametrize(
    ("heads", "nodes", "head_dim", "function"),
    [
        (2, 128, 256, "op"),
        (2, 129, 256, "original"),
        (2, 3, 260, "original"),
        (17, 3, 8, "original"),
        (2, 3, 6, "original"),
    ],
)
def test_sizes_beyond_the_limits_of_the_kernels_keep_their_function(
    heads, nodes, head_dim, function
):
    class Block:
        def attend(self, *_):
            return "op"

    mask = attention.with_rule(torch.ones(1, 1, 1, 1), attention.MaskRule(Block(), 0))
    attend = attention.with_tree_attention(lambda *_: ("original", None))
    with FakeTensorMode():
        query = torch.empty(1, heads, nodes, head_dim, device="cuda")
        key = torch.empty(1, 1, 200, head_dim, device="cuda")
    assert attend(None, query, key, key, mask) == (function, None)


def test_paddings_between_tokens_keep_the_mask(served):
    model = tiny_model("llama")
    ids, mask = prompts((9, 4), side="right")
    alone = [text(model, ids[row : row + 1, :n], None)[0] for row, n in enumerate((9, 4))]
    assert text(model, ids, mask, drafter="ngram") == alone
    assert not served


def test_mask_that_the_model_changed_is_used(served, monkeypatch):
    """A model that changes its mask uses sdpa with that mask."""
    model = tiny_model("llama")
    ids = torch.randint(1, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    layer = type(model.model.layers[0].self_attn)
    original = layer.forward

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        if attention_mask is not None:
            attention_mask = attention_mask[..., :]
        return original(self, hidden_states, position_embeddings, attention_mask, **kwargs)

    monkeypatch.setattr(layer, "forward", forward)
    assert text(model, ids, None, drafter="ngram") == text(model, ids, None)
    assert not served
