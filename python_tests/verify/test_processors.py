"""Custom logits processors have at every visited node the inputs of plain decoding.

Claim: greedy text is that of HF ``model.generate`` with the same processors (float32, exact), and sampled
text with a seed is that of plain decoding, with and without state, in batches of 1 and 5, with every draft. A
processor with state has the calls of HF's loop, with the same ids. ``test_keywords.py`` tests every processor
of transformers.
"""

import functools

import pytest
import torch
from helpers.models.tiny import (
    BATCHES,
    VOCAB,
    every_batch,
    every_drafter,
    generated,
    make_drafter,
    prompts,
    tiny_model,
)
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

import specdec_ext

NEW_TOKENS = 16
FEW_DRAFTERS = ["self", "noisy_chain", "random_tree"]
SAMPLED = dict(max_new_tokens=NEW_TOKENS, do_sample=True, seed=23)


class EvenAfterOdd(LogitsProcessor):
    """Has no state: even and odd tokens alternate."""

    def __call__(self, input_ids, scores):
        same = (torch.arange(VOCAB)[None] % 2) == (input_ids[:, -1:] % 2)
        return scores.masked_fill(same, -torch.inf)


class Counting(LogitsProcessor):
    """Has state: its n-th call favours token 7 n. Keeps the ids of its calls."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.clone())
        scores[:, 7 * len(self.seen) % VOCAB] += 4.0  # in place, as many do
        return scores


class ReadsNeighbours(LogitsProcessor):
    """Excludes in row b the last token of row b - 1."""

    def __call__(self, input_ids, scores):
        neighbours = input_ids[:, -1].roll(1)
        return scores.scatter(1, neighbours[:, None], -torch.inf)


class CoolingDown(hf.TemperatureLogitsWarper):
    """A subclass of a built-in processor, with state."""

    def __call__(self, input_ids, scores):
        self.temperature *= 0.9
        return super().__call__(input_ids, scores)


EOS = 42  # occurs in some texts of this model
CASES = {
    "stateless": dict(logits_processor=EvenAfterOdd),
    "with-state": dict(logits_processor=Counting),
    "across-rows": dict(logits_processor=ReadsNeighbours, eos_token_id=EOS),
    "several": dict(repetition_penalty=1.2, no_repeat_ngram_size=3, bad_words_ids=[[5]], eos_token_id=EOS,
        min_new_tokens=4, logits_processor=Counting),
}  # fmt: skip
SAMPLING = {
    "all-warpers": dict(temperature=1.4, top_k=30, top_p=0.9, min_p=0.01, renormalize_logits=True),
    "subclass-with-state": dict(logits_processor=functools.partial(CoolingDown, 1.5)),
}


def fresh(kwargs: dict) -> dict:
    """``kwargs`` with a new instance of the custom processor."""
    kwargs = dict(kwargs)
    if "logits_processor" in kwargs:
        kwargs["logits_processor"] = LogitsProcessorList([kwargs["logits_processor"]()])
    return kwargs


def keywords(batch: str, case: str) -> dict:
    mask = prompts(BATCHES[batch])[1]
    return dict(
        attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **fresh(CASES[case])
    )


@functools.cache
def hf_text(case: str, batch: str) -> torch.Tensor:
    ids = prompts(BATCHES[batch])[0]
    return tiny_model("llama").generate(ids, **keywords(batch, case))


def greedy(case: str, batch: str, drafter: str, **kwargs):
    """Our output; scripted drafters propose parts of HF's text."""
    ids, model = prompts(BATCHES[batch])[0], tiny_model("llama")
    made = make_drafter(drafter, model, generated(hf_text(case, batch), ids.shape[1]))
    return specdec_ext.generate(model, ids, drafter=made, **keywords(batch, case), **kwargs)


@every_batch
@pytest.mark.parametrize("drafter", ["none", *FEW_DRAFTERS])
@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_hf(case, drafter, batch):
    assert torch.equal(greedy(case, batch, drafter), hf_text(case, batch))


@pytest.mark.parametrize("case", CASES)
def test_greedy_cases_change_the_text(case):
    ids, mask = prompts(BATCHES["five-ragged"])
    kwargs = {k: v for k, v in CASES[case].items() if k == "eos_token_id"}
    kwargs |= dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    without = tiny_model("llama").generate(ids, **kwargs)
    assert not torch.equal(hf_text(case, "five-ragged"), without)


@functools.cache
def plain_sample(case: str, batch: str) -> torch.Tensor:
    return sample(case, batch, None)


def sample(case: str, batch: str, drafter) -> torch.Tensor:
    ids, mask = prompts(BATCHES[batch])
    kwargs = dict(top_k=0, **SAMPLED) | fresh({**CASES, **SAMPLING, "none": {}}[case])
    model = tiny_model("llama")
    return specdec_ext.generate(model, ids, attention_mask=mask, drafter=drafter, **kwargs)


@every_batch
@pytest.mark.parametrize("drafter", FEW_DRAFTERS)
@pytest.mark.parametrize("case", [*SAMPLING, *CASES])
def test_sampled_text_does_not_depend_on_the_draft(case, drafter, batch):
    expected = plain_sample(case, batch)
    answers = generated(expected, max(BATCHES[batch]))
    actual = sample(case, batch, make_drafter(drafter, tiny_model("llama"), answers))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("case", SAMPLING)
def test_sampling_cases_change_the_text(case):
    texts = [plain_sample(each, "five-ragged") for each in (case, "none")]
    assert not torch.equal(*texts)


@every_batch
@every_drafter
@pytest.mark.parametrize("eos", [None, EOS], ids=["no-eos", "eos"])
def test_processor_with_state_has_the_calls_of_plain_decoding(eos, drafter, batch):
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model("llama")
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=eos)
    theirs, mine = Counting(), Counting()
    expected = model.generate(ids, logits_processor=[theirs], **kwargs)
    made = make_drafter(drafter, model, generated(expected, ids.shape[1]))
    actual = specdec_ext.generate(model, ids, logits_processor=[mine], drafter=made, **kwargs)
    assert torch.equal(actual, expected)
    assert len(mine.seen) == len(theirs.seen)
    for a, b in zip(mine.seen, theirs.seen, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("drafter", ["ngram", "self", "oracle_chain", "oracle_tree"])
def test_drafts_are_accepted_with_a_processor_with_state(drafter):
    kwargs = dict(speculation="fixed", return_dict_in_generate=True)
    out = greedy("with-state", "one", drafter, **kwargs)
    assert torch.equal(out.sequences, hf_text("with-state", "one"))
    if drafter.startswith("oracle"):
        assert out.speculation_stats.emitted_per_step > 3


def test_batch_with_a_processor_with_state_emits_whole_blocks():
    """Rows advance together and keep their accepted tokens while they wait."""
    kwargs = dict(speculation="fixed", return_dict_in_generate=True)
    out = greedy("with-state", "five-ragged", "oracle_chain", **kwargs)
    assert torch.equal(out.sequences, hf_text("with-state", "five-ragged"))
    assert out.speculation_stats.emitted_per_step > 3
