"""``prefill_chunk_size``: the prompt in chunks, with the text, the features and the cache of one pass.

Sizes that divide the prompt and sizes that don't, paddings wherever they may be, windows shorter and longer
than a chunk, caches that hold a part of the prompt. What a pass holds at once is bounded by the chunk.
"""

from __future__ import annotations

import functools

import pytest
import torch
import zoo
from head_cases import head_of
from padding_cases import LAYOUTS, NEW_TOKENS, alone, layout
from recurrent_models import KINDS as RECURRENT
from recurrent_models import recurrent_models
from tiny import ARCHITECTURES, generated, make_drafter, prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import specdec_ext
from specdec_ext import HeadDrafter
from specdec_ext.models import make_target, supports

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
SLOW = pytest.mark.slow
CHUNKS = (pytest.param(1, marks=SLOW), 4, pytest.param(7, marks=SLOW))


@pytest.fixture
def models() -> dict[str, PreTrainedModel]:
    return recurrent_models()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padded_rows_as_alone(name, kind, chunk):
    """Rows padded on the right end in an earlier chunk than others; a chunk may hold paddings alone."""
    model = tiny_model(name)
    ids, mask = layout(kind)
    actual = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        drafter=make_drafter("noisy_chain", model, alone(name)),
        prefill_chunk_size=chunk,
    )
    assert generated(actual, ids.shape[1]) == alone(name)


@functools.cache
def long_text(name: str) -> torch.Tensor:
    """HF's text after a prompt of 23 tokens."""
    ids, mask = prompts((23,))
    return tiny_model(name).generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("chunk", [5, *(pytest.param(n, marks=SLOW) for n in (1, 8, 22, 23, 99))])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_long_prompt(name, chunk):
    """Of one row without paddings, as transformers' own chunks."""
    model, expected = tiny_model(name), long_text(name)
    actual = specdec_ext.generate(
        model,
        expected[:, :23],
        max_new_tokens=12,
        do_sample=False,
        drafter=make_drafter("oracle_tree", model, generated(expected, 23)),
        prefill_chunk_size=chunk,
    )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_features_and_logits_of_all_columns(name, chunk, side):
    model = tiny_model(name)
    ids, mask = prompts((5, 9, 2), side=side)
    outputs = []
    for size in (None, chunk):
        target = make_target(model, None, 64)
        target.tap((0, 2, -1))
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
def test_a_draft_head_reads_every_column(side):
    """Its drafts are those after a prompt in one pass."""
    ids, mask = prompts((5, 9, 2), side=side)
    drafter = Remembering(head_of("eagle3"))
    runs = []
    for options in ({}, {"prefill_chunk_size": 4}):
        text = specdec_ext.generate(
            tiny_model("llama"),
            ids,
            attention_mask=mask,
            drafter=drafter,
            speculation="fixed",
            max_new_tokens=NEW_TOKENS,
            **options,
        )
        runs.append((text.tolist(), drafter.trees))
    assert runs[0] == runs[1]
    assert len(runs[0][1]) > 2


@pytest.mark.parametrize("held", [1, 6, 10])
@pytest.mark.parametrize("name", ["llama", "gemma2-window"])
def test_behind_a_filled_cache(name, held):
    """Only what the cache does not hold is read, a chunk at a time."""
    model, (ids, mask) = tiny_model(name), layout("left")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, :held]
        model(
            ids[:, :held],
            attention_mask=mask[:, :held],
            position_ids=positions,
            past_key_values=cache,
        )
    actual = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        prefill_chunk_size=3,
    )
    assert generated(actual, ids.shape[1]) == alone(name)
    assert cache.get_seq_length() == actual.shape[1] - 1


def test_recorded_outputs_are_those_of_transformers():
    """The prompt's hidden states and attentions are those of its last chunk."""
    model = tiny_model("llama", "eager")
    ids, mask = prompts((11,))
    kwargs = dict(
        attention_mask=mask,
        max_new_tokens=5,
        do_sample=False,
        prefill_chunk_size=4,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_attentions=True,
        output_logits=True,
    )
    expected = model.generate(ids, **kwargs)
    actual = specdec_ext.generate(
        model,
        ids,
        drafter=make_drafter("oracle_chain", model, generated(expected.sequences, 11)),
        **kwargs,
    )
    assert torch.equal(actual.sequences, expected.sequences)
    for part in ("hidden_states", "attentions", "logits"):
        for ours, theirs in zip(actual[part], expected[part], strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("lengths", [(17,), (9, 2, 17)], ids=["one", "ragged"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers(models, kind, lengths):
    """They skip paddings in a first pass only: it reads all of them, whatever the size."""
    model, (ids, mask) = models[kind], prompts(lengths)
    kwargs = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **kwargs)
    actual = specdec_ext.generate(
        model,
        ids,
        drafter=make_drafter("noisy_chain", model, generated(expected, ids.shape[1])),
        prefill_chunk_size=4,
        **kwargs,
    )
    assert torch.equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_architecture(name):
    """The text of a prompt in one pass. Chunks of Doge and Moshi have one of their own, with transformers,
    too; those of Jamba with transformers alone, whose Mamba-1 mixers forget their states."""
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
            pytest.skip("wrong without chunks, too, which is another test's matter")
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"not served without chunks: {error}")
    actual = specdec_ext.generate(model, ids, drafter=None, prefill_chunk_size=5, **kwargs)
    assert torch.equal(actual, chunked if name in ("doge", "moshi") else expected)


class LargestTensor(TorchDispatchMode):
    """The most elements that an op put out, views and the cache's buffers aside."""

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
def test_a_chunk_bounds_what_a_pass_holds(padded):
    """Of eager attention, which holds its scores: they grow with the prompt, not with its square."""
    model = tiny_model("llama", "eager")
    ids, mask = prompts((240, 200) if padded else (240,))
    largest = {}
    for chunk in (None, 16):
        with LargestTensor() as seen:
            specdec_ext.generate(
                model, ids, attention_mask=mask, max_new_tokens=2, prefill_chunk_size=chunk
            )
        largest[chunk] = seen.elements
    assert largest[16] * 10 < largest[None]


@pytest.mark.parametrize("size", [0, -3, 2.5, True])
def test_a_size_that_is_none(size):
    with pytest.raises(ValueError, match=r"prefill_chunk_size is .*at least 1"):
        specdec_ext.generate(
            tiny_model("llama"), prompts((4,))[0], max_new_tokens=1, prefill_chunk_size=size
        )
