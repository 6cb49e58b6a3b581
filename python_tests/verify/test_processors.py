"""Logits processors see at every visited node exactly what plain decoding would show them.

Claim: greedy text equals HF ``model.generate`` with the same processors (float32, exact), seeded sampled text
equals our own without speculation, for every built-in processor and for custom ones, with and without state,
at batch 1 and 5, whatever is drafted. A processor that keeps state is called as often, in the same order and
with the same ids as by HF's loop.
"""

import functools

import pytest
import torch
from tiny import DRAFTERS, VOCAB, generated, make_drafter, prompts, tiny_model
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, WatermarkingConfig
from transformers.generation import logits_process as hf

import specdec_ext

BATCHES = {"one": (7,), "five-ragged": (12, 3, 9, 5, 12)}
NEW_TOKENS = 16

every_batch = pytest.mark.parametrize("batch", BATCHES)
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
FEW_DRAFTERS = ["self", "noisy_chain", "random_tree"]


class EvenAfterOdd(LogitsProcessor):
    """No state: parity alternates."""

    def __call__(self, input_ids, scores):
        same = (torch.arange(VOCAB)[None] % 2) == (input_ids[:, -1:] % 2)
        return scores.masked_fill(same, -torch.inf)


class Counting(LogitsProcessor):
    """State: its n-th call favours token 7 n. Remembers what it was shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.clone())
        scores[:, 7 * len(self.seen) % VOCAB] += 4.0  # in place, as many do
        return scores


class LooksAtNeighbours(LogitsProcessor):
    """Row b avoids the newest token of row b - 1."""

    def __call__(self, input_ids, scores):
        neighbours = input_ids[:, -1].roll(1)
        return scores.scatter(1, neighbours[:, None], -torch.inf)


class CoolingDown(hf.TemperatureLogitsWarper):
    """A built-in's subclass with state is not the built-in."""

    def __call__(self, input_ids, scores):
        self.temperature *= 0.9
        return super().__call__(input_ids, scores)


def even_or_near(batch_id: int, text: torch.Tensor) -> list[int]:
    """For ``prefix_allowed_tokens_fn``: depends on the row and on its newest token."""
    last = int(text[-1])
    return [(last + batch_id + step) % VOCAB for step in range(1, 40, 3)]


EOS = 42  # occurs now and then in the texts of this model
GREEDY = {
    "repetition-penalty": dict(repetition_penalty=1.4),
    "encoder-repetition-penalty": dict(encoder_repetition_penalty=1.3),
    "no-repeat-ngram": dict(no_repeat_ngram_size=2),
    "encoder-no-repeat-ngram": dict(encoder_no_repeat_ngram_size=1),
    "bad-words": dict(bad_words_ids=[[43], [48, 84], [66]]),
    "min-new-tokens": dict(eos_token_id=[EOS, 48], min_new_tokens=9),
    "min-length": dict(eos_token_id=[EOS, 48], min_length=16),
    "forced-eos": dict(forced_eos_token_id=EOS, eos_token_id=EOS),
    "sequence-bias": dict(sequence_bias=[[[48, 23], 6.0], [[43], -4.0], [[19], 2.0]]),
    "suppress-tokens": dict(suppress_tokens=[43, 48, 66]),
    "suppress-at-begin": dict(begin_suppress_tokens=[9, 48, 2, 35, 96]),
    "exponential-decay": dict(exponential_decay_length_penalty=(3, 1.7), eos_token_id=EOS),
    "prefix-allowed-tokens": dict(prefix_allowed_tokens_fn=even_or_near),
    "remove-invalid-values": dict(remove_invalid_values=True),
    "renormalize": dict(renormalize_logits=True, repetition_penalty=1.2),
    "guidance-scale": dict(guidance_scale=1.6),
    "watermark": dict(watermarking_config=WatermarkingConfig(bias=3.0)),
    "custom-stateless": dict(logits_processor=EvenAfterOdd),
    "custom-with-state": dict(logits_processor=Counting),
    "custom-across-rows": dict(logits_processor=LooksAtNeighbours, eos_token_id=EOS),
    "several": dict(repetition_penalty=1.2, no_repeat_ngram_size=3, bad_words_ids=[[5]], eos_token_id=EOS,
        min_new_tokens=4, logits_processor=Counting),
}  # fmt: skip
SAMPLING = {
    "temperature": dict(temperature=0.6, top_k=0),
    "top-k": dict(top_k=7),
    "top-p": dict(top_k=0, top_p=0.7),
    "min-p": dict(top_k=0, min_p=0.15),
    "typical": dict(top_k=0, typical_p=0.6),
    "epsilon": dict(top_k=0, epsilon_cutoff=0.02),
    "eta": dict(top_k=0, eta_cutoff=0.05),
    "top-h": dict(top_k=0, top_h=0.5),
    "all-warpers": dict(temperature=1.4, top_k=30, top_p=0.9, min_p=0.01, renormalize_logits=True),
    "subclass-with-state": dict(top_k=0, logits_processor=functools.partial(CoolingDown, 1.5)),
}


def fresh(kwargs: dict) -> dict:
    """``kwargs`` with a new instance of the custom processor."""
    kwargs = dict(kwargs)
    if "logits_processor" in kwargs:
        kwargs["logits_processor"] = LogitsProcessorList([kwargs["logits_processor"]()])
    return kwargs


@functools.cache
def hf_text(case: str, batch: str) -> torch.Tensor:
    ids, mask = prompts(BATCHES[batch])
    kwargs = fresh(GREEDY[case])
    return tiny_model("llama").generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **kwargs
    )


@every_batch
@pytest.mark.parametrize("drafter", ["none", *FEW_DRAFTERS])
@pytest.mark.parametrize("case", GREEDY)
def test_greedy_text_is_that_of_hf(case, drafter, batch):
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model("llama")
    expected = hf_text(case, batch)
    actual = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        drafter=make_drafter(drafter, model, generated(expected, ids.shape[1])),
        **fresh(GREEDY[case]),
    )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("case", [case for case in GREEDY if case != "remove-invalid-values"])
def test_the_greedy_cases_change_the_text(case):
    """A processor that changes nothing would prove nothing."""
    ids, mask = prompts(BATCHES["five-ragged"])
    kwargs = {k: v for k, v in GREEDY[case].items() if k == "eos_token_id"}
    without = tiny_model("llama").generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **kwargs
    )
    assert not torch.equal(hf_text(case, "five-ragged"), without)


@functools.cache
def plain_sample(case: str, batch: str) -> torch.Tensor:
    return sample(case, batch, None)


def sample(case: str, batch: str, drafter) -> torch.Tensor:
    ids, mask = prompts(BATCHES[batch])
    kwargs = fresh({**GREEDY, **SAMPLING}[case])
    return specdec_ext.generate(
        tiny_model("llama"),
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        seed=23,
        drafter=drafter,
        **{"top_k": 0, **kwargs},
    )


@every_batch
@pytest.mark.parametrize("drafter", FEW_DRAFTERS)
@pytest.mark.parametrize("case", [*SAMPLING, *GREEDY])
def test_sampled_text_does_not_depend_on_the_draft(case, drafter, batch):
    expected = plain_sample(case, batch)
    answers = generated(expected, max(BATCHES[batch]))
    actual = sample(case, batch, make_drafter(drafter, tiny_model("llama"), answers))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("case", SAMPLING)
def test_the_sampling_cases_change_the_text(case):
    ids, mask = prompts(BATCHES["five-ragged"])
    without = specdec_ext.generate(
        tiny_model("llama"),
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=0,
        seed=23,
    )
    assert not torch.equal(plain_sample(case, "five-ragged"), without)


@every_batch
@every_drafter
@pytest.mark.parametrize("eos", [None, EOS], ids=["no-eos", "eos"])
def test_a_processor_with_state_is_called_as_by_plain_decoding(eos, drafter, batch):
    """As often, in order, with the same ids: rejected drafts leave no trace, rows advance together."""
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
def test_processors_do_not_keep_drafts_from_being_accepted(drafter):
    """Stepwise processors walk the tree, too: right drafts are accepted whole."""
    ids, mask = prompts(BATCHES["one"])
    model = tiny_model("llama")
    expected = hf_text("custom-with-state", "one")
    out = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        speculation="fixed",
        drafter=make_drafter(drafter, model, generated(expected, 7)),
        return_dict_in_generate=True,
        **fresh(GREEDY["custom-with-state"]),
    )
    assert torch.equal(out.sequences, expected)
    if drafter.startswith("oracle"):
        assert out.speculation_stats.emitted_per_step > 3


def test_a_batch_of_stateful_rows_waits_for_the_slowest_only_while_it_must():
    """Rows that wait keep what they accepted: an oracle emits whole blocks in lockstep."""
    ids, mask = prompts(BATCHES["five-ragged"])
    model = tiny_model("llama")
    expected = hf_text("custom-with-state", "five-ragged")
    out = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        speculation="fixed",
        drafter=make_drafter("oracle_chain", model, generated(expected, 12)),
        return_dict_in_generate=True,
        **fresh(GREEDY["custom-with-state"]),
    )
    assert torch.equal(out.sequences, expected)
    assert out.speculation_stats.emitted_per_step > 3


def test_the_same_processors_in_the_generation_config():
    """Set on the config, not as keywords."""
    ids, mask = prompts(BATCHES["five-ragged"])
    model = tiny_model("llama")
    config = GenerationConfig(
        pad_token_id=0, repetition_penalty=1.4, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    actual = specdec_ext.generate(model, ids, attention_mask=mask, generation_config=config)
    assert torch.equal(actual, hf_text("repetition-penalty", "five-ragged"))
