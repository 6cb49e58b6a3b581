"""``prefill_chunk_size``: a prompt in chunks gives the text, the features and the cache of one pass.

Sizes may divide the prompt or not, windows may be shorter or longer than a chunk, and a cache may hold a part
of the prompt. The chunk bounds the memory of a pass.
"""

from __future__ import annotations

import pytest
import torch
from helpers.drafters.head_cases import head_of
from helpers.models import zoo
from helpers.models.recurrent_models import KINDS as RECURRENT
from helpers.models.recurrent_models import recurrent_models
from helpers.models.tiny import (
    ARCHITECTURES,
    generated,
    greedy_text,
    make_drafter,
    prompts,
    tiny_model,
)
from helpers.texts.padding_cases import LAYOUTS, NEW_TOKENS, alone, continued, layout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import specdec_ext
from specdec_ext import HeadDrafter
from specdec_ext.models import make_target, supports
from specdec_ext.models.compat import CACHE

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
SLOW = pytest.mark.slow
CHUNKS = (pytest.param(1, marks=SLOW), 4, pytest.param(7, marks=SLOW))


@pytest.fixture
def models() -> dict[str, PreTrainedModel]:
    return recurrent_models()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padded_rows_have_their_own_text(name, kind, chunk):
    """Rows padded on the right end in an earlier chunk than others; a chunk may hold only paddings."""
    actual = continued(name, *layout(kind), "noisy_chain", prefill_chunk_size=chunk)
    assert actual == alone(name)


@pytest.mark.parametrize("chunk", [5, *(pytest.param(n, marks=SLOW) for n in (1, 8, 22, 23, 99))])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_long_prompt_has_the_text_of_one_pass(name, chunk):
    """One row without paddings, which transformers also reads in chunks."""
    ids, mask, sequences = greedy_text(name, (23,), 12)
    answers = generated(sequences, 23)
    kwargs = dict(max_new_tokens=12, prefill_chunk_size=chunk)
    assert continued(name, ids, mask, "oracle_tree", answers, **kwargs) == answers


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_features_and_logits_are_those_of_one_pass(name, chunk, side):
    model = tiny_model(name)
    ids, mask = prompts((5, 9, 2), side=side)
    outputs = []
    for size in (None, chunk):
        target = make_target(model, 64)
        target.record_hidden_states((0, 2, -1))
        target.admit(ids, {"attention_mask": mask}, GenerationConfig(prefill_chunk_size=size))
        outputs.append(target.prefill(ids, mask))
    whole, chunked = outputs
    valid = mask.bool()
    assert chunked.logits.shape == whole.logits.shape == (3, 1, target.vocab_size)
    torch.testing.assert_close(chunked.logits, whole.logits, **CLOSE)
    assert chunked.features.shape == whole.features.shape
    torch.testing.assert_close(chunked.features[valid], whole.features[valid], **CLOSE)


class Remembering(HeadDrafter):
    """Keeps the trees that it proposes."""

    def start(self, context, model, output):
        super().start(context, model, output)
        self.trees = []

    def propose(self, context):
        tree = super().propose(context)
        self.trees.append((tree.tokens.tolist(), tree.parents.tolist()))
        return tree


@pytest.mark.parametrize("side", ["left", "right"])
def test_draft_head_drafts_as_after_one_pass(side):
    ids, mask = prompts((5, 9, 2), side=side)
    drafter = Remembering(head_of("eagle3"))
    runs = []
    for options in ({}, {"prefill_chunk_size": 4}):
        options |= dict(attention_mask=mask, speculation="fixed", max_new_tokens=NEW_TOKENS)
        text = specdec_ext.generate(tiny_model("llama"), ids, drafter=drafter, **options)
        runs.append((text.tolist(), drafter.trees))
    assert runs[0] == runs[1]
    assert len(runs[0][1]) > 2


@pytest.mark.parametrize("held", [1, 6, 10])
@pytest.mark.parametrize("name", ["llama", "gemma2-window"])
def test_text_behind_a_filled_cache_is_read_in_chunks(name, held):
    model, (ids, mask) = tiny_model(name), layout("left")
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, :held]
    with torch.no_grad():
        model(
            ids[:, :held],
            attention_mask=mask[:, :held],
            position_ids=positions,
            **{CACHE: cache},
        )
    actual = continued(name, ids, mask, past_key_values=cache, prefill_chunk_size=3)
    assert actual == alone(name)
    assert cache.get_seq_length() == ids.shape[1] + NEW_TOKENS - 1


def test_recorded_outputs_are_those_of_transformers():
    """Hidden states and attentions of the prompt are those of its last chunk."""
    model = tiny_model("llama", "eager")
    ids, mask = prompts((11,))
    parts = ("hidden_states", "attentions", "logits")
    kwargs = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, prefill_chunk_size=4)
    kwargs |= {"return_dict_in_generate": True, **{f"output_{part}": True for part in parts}}
    expected = model.generate(ids, **kwargs)
    drafter = make_drafter("oracle_chain", model, generated(expected.sequences, 11))
    actual = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
    assert torch.equal(actual.sequences, expected.sequences)
    for part in parts:
        for ours, theirs in zip(actual[part], expected[part], strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("lengths", [(17,), (9, 2, 17)], ids=["one", "ragged"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_have_the_text_of_one_pass(models, kind, lengths):
    """They skip paddings only in a first pass, so that pass reads all paddings."""
    model, (ids, mask) = models[kind], prompts(lengths)
    kwargs = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **kwargs)
    drafter = make_drafter("noisy_chain", model, generated(expected, ids.shape[1]))
    actual = specdec_ext.generate(model, ids, drafter=drafter, prefill_chunk_size=4, **kwargs)
    assert torch.equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_architecture_has_the_text_of_one_pass(name):
    """Except Doge and Moshi, whose chunks give another text in transformers, too. (In transformers Jamba's
    chunks do as well, because its Mamba-1 mixers forget their states.)"""
    try:
        model = zoo.build(name)
        ids = prompts((17, 17))[0]
        kwargs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        expected, chunked = (
            model.generate(ids, prefill_chunk_size=size, **kwargs) for size in (None, 5)
        )
    except Exception as error:
        pytest.skip(f"can't be built, or not run by transformers itself: {error}")
    if not supports(model).by_slots:
        pytest.skip("transformers prepares its passes, chunks included")
    try:
        if not torch.equal(specdec_ext.generate(model, ids, drafter=None, **kwargs), expected):
            pytest.skip("the text differs without chunks, too, which another test checks")
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"not served without chunks: {error}")
    actual = specdec_ext.generate(model, ids, drafter=None, prefill_chunk_size=5, **kwargs)
    assert torch.equal(actual, chunked if name in ("doge", "moshi") else expected)


class LargestTensor(TorchDispatchMode):
    """The largest number of elements of an op's output, except views and buffers of the cache."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if (
                isinstance(leaf, torch.Tensor)
                and not leaf._is_view()
                and func is not torch.ops.aten.zeros.default
            ):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("padded", [False, True])
def test_chunk_bounds_the_scores_of_a_pass(padded):
    """The scores of eager attention grow with the length of the prompt, not with its square."""
    model = tiny_model("llama", "eager")
    ids, mask = prompts((240, 200) if padded else (240,))
    largest = {}
    for chunk in (None, 16):
        with LargestTensor() as seen:
            kwargs = dict(attention_mask=mask, max_new_tokens=2, prefill_chunk_size=chunk)
            specdec_ext.generate(model, ids, **kwargs)
        largest[chunk] = seen.elements
    assert largest[16] * 10 < largest[None]


@pytest.mark.parametrize("size", [0, -3, 2.5, True])
def test_other_sizes_are_refused(size):
    with pytest.raises(ValueError, match=r"prefill_chunk_size is .*at least 1"):
        continued("llama", *prompts((4,)), prefill_chunk_size=size)
