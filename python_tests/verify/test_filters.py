"""``fuse_filters`` replaces warpers by fewer calls with the same scores and the same text."""

import itertools

import pytest
import torch
from helpers.models.tiny import prompts, tiny_model
from helpers.ops.op_cases import generator
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

import specdec_ext
from specdec_ext.keyword_table import CONFIG, PARTS
from specdec_ext.verify import processors
from specdec_ext.verify.filters import SampleFilter, fuse_filters

CPU = torch.device("cpu")
TEMPERATURE, TOP_K = hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(20)
TOP_P, MIN_P = hf.TopPLogitsWarper(0.8), hf.MinPLogitsWarper(0.05)
PENALTY = hf.RepetitionPenaltyLogitsProcessor(1.4)
TYPICAL, NORMALIZE = hf.TypicalLogitsWarper(0.9), hf.LogitNormalization()
IN_ORDER = [TEMPERATURE, TOP_K, TOP_P, MIN_P]
ids = torch.tensor([[1, 5, 7]]).expand(6, 3)
logits = torch.randn(6, 300, generator=generator(0)) * 3


class MyTopK(hf.TopKLogitsWarper):
    """A subclass, which is never fused."""


def kinds(processors):
    return [type(processor) for processor in fuse_filters(processors, CPU)]


@pytest.mark.parametrize("count", range(1, 5))
def test_warpers_in_order_become_one_op(count):
    for warpers in itertools.combinations(IN_ORDER, count):
        fused = fuse_filters(warpers, CPU)
        assert kinds(warpers) == [SampleFilter]
        expected = LogitsProcessorList(warpers)(ids, logits)
        assert torch.equal(fused(ids, logits), expected)


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        ([], []),
        ([PENALTY, *IN_ORDER], [type(PENALTY), SampleFilter]),
        ([*IN_ORDER, NORMALIZE], [SampleFilter, type(NORMALIZE)]),
        ([TEMPERATURE, TYPICAL, TOP_K, MIN_P], [SampleFilter, type(TYPICAL), SampleFilter]),
        ([TOP_P, TOP_K], [SampleFilter, SampleFilter]),
        ([TOP_P, TOP_P], [SampleFilter, SampleFilter]),
        ([MIN_P, *IN_ORDER], [SampleFilter, SampleFilter]),
        ([TEMPERATURE, MyTopK(3)], [SampleFilter, MyTopK]),
        ([hf.TopKLogitsWarper(3, filter_value=-1e9)], [hf.TopKLogitsWarper]),
        ([hf.TopPLogitsWarper(0.1, min_tokens_to_keep=4)], [hf.TopPLogitsWarper]),
        ([hf.MinPLogitsWarper(1, min_tokens_to_keep=2)], [hf.MinPLogitsWarper]),
    ],
    ids=lambda value: None if not value else "-".join(type(each).__name__ for each in value),
)
def test_only_plain_warpers_in_order_are_fused(processors, expected):
    assert kinds(processors) == expected
    actual = fuse_filters(processors, CPU)(ids, logits.clone())
    torch.testing.assert_close(actual, LogitsProcessorList(processors)(ids, logits.clone()))


def test_sixteen_bit_logits_need_no_copy():
    half = logits.bfloat16()
    fused = fuse_filters(IN_ORDER, CPU)
    assert torch.equal(fused(ids, half), fused(ids, half.float()))


def test_scores_do_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert fuse_filters(IN_ORDER, CPU)(ids, logits).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("size", [40, 1000])
def test_as_many_ties_of_top_p_are_kept_as_in_transformers(size):
    """They may be others, as the table of keywords tells."""
    scores = torch.randn(50, size, generator=generator(0)).round(decimals=1)
    warper = hf.TopPLogitsWarper(0.8)
    (ours,) = fuse_filters(LogitsProcessorList([warper]), CPU)
    kept, theirs = ours(ids, scores.clone()), warper(ids, scores.clone())
    assert torch.equal(kept.sort().values, theirs.sort().values)
    assert "tie" in PARTS["TopPLogitsWarper"].note and "tie" in CONFIG["top_p"].note


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(temperature=0.6, top_k=50, top_p=0.9, min_p=0.02),
        dict(top_k=0, top_p=0.7, renormalize_logits=True),
        dict(top_k=7, repetition_penalty=1.3),
        dict(top_k=0, temperature=1.5, typical_p=0.8, min_p=0.1),
    ],
    ids=["all", "top-p", "with-text", "interrupted"],
)
def test_text_is_that_of_the_warpers(kwargs, drafter, monkeypatch):
    batch, mask = prompts((12, 3, 9))

    def text():
        options = dict(attention_mask=mask, max_new_tokens=24, do_sample=True, seed=5, **kwargs)
        return specdec_ext.generate(tiny_model("llama"), batch, drafter=drafter, **options)

    calls = []
    monkeypatch.setattr(
        SampleFilter,
        "__call__",
        lambda *args, op=SampleFilter.__call__: calls.append(1) or op(*args),
    )
    fused = text()
    assert calls
    monkeypatch.setattr(processors, "fuse_filters", lambda processors, device: processors)
    calls.clear()
    assert torch.equal(fused, text())
    assert not calls
