"""Sampled text has the distribution of plain transformers, for all processors and drafts.

The model has six tokens. Transformers gives the exact distribution of the first three: its sampling loop is
made to draw each of the 216 texts, and its scores give their probabilities. 6000 of our texts, with random
trees or with drafts of a model without the processors, must pass a chi-square test at four standard
deviations. A temperature that is 10 % higher fails it.
"""

import functools
import itertools

import pytest
import torch
from helpers.checks.distributions import chi_square_excess
from helpers.models.tiny import SIZES
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process as hf

import specdec_ext
from specdec_ext import Drafter, DraftModelDrafter, DraftTree

VOCAB, LENGTH, DRAWS = 6, 3, 6000
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
TEXTS = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))


@functools.cache
def six_token_model():
    torch.manual_seed(6)
    sizes = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1)
    config = AutoConfig.for_model("llama", **{**SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(15)  # neither uniform nor certain
    return model


class Calls(LogitsProcessor):
    """Its n-th call favours token n."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, self.calls % VOCAB] += 1.5
        return scores


class CoolingDown(hf.TemperatureLogitsWarper):
    """A built-in's subclass that keeps state."""

    def __init__(self):
        super().__init__(1.6)

    def __call__(self, input_ids, scores):
        self.temperature *= 0.8
        return super().__call__(input_ids, scores)


class Momentum(LogitsProcessor):
    """Adds the mean of earlier scores of the row."""

    def __init__(self):
        self.mean = 0

    def __call__(self, input_ids, scores):
        self.mean = 0.5 * self.mean + 0.5 * scores
        return scores + self.mean


WARPERS = {
    "none": {},
    "temperature": dict(temperature=0.7),
    "top-k": dict(top_k=4),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.15),
    "top-h": dict(top_h=0.6),
    "typical": dict(typical_p=0.8),
    "epsilon": dict(epsilon_cutoff=0.1),
    "eta": dict(eta_cutoff=0.3),
    "renormalize": dict(renormalize_logits=True, temperature=1.3),
    "all": dict(temperature=1.2, top_k=5, top_p=0.95, min_p=0.02, typical_p=0.97),
    "repetition-penalty": dict(repetition_penalty=1.5),
    "no-repeat-ngram": dict(no_repeat_ngram_size=2),
    "sequence-bias": dict(sequence_bias=[[[1], 1.0], [[2, 4], 3.0]]),
    "watermark": dict(watermarking_config=WatermarkingConfig(bias=1.0)),
}
STATEFUL = {
    "calls": dict(logits_processor=Calls),
    "cooling-down": dict(logits_processor=CoolingDown),
    "momentum": dict(logits_processor=Momentum),
    "synth-id": dict(watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=2, keys=[5, 9, 17])),
    "guidance": dict(guidance_scale=1.8),
}  # fmt: skip
IN_MAKE_TEST = ["top-h", "all"]


def fresh(kwargs: dict) -> dict:
    kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, **kwargs}
    if "logits_processor" in kwargs:
        kwargs["logits_processor"] = [kwargs["logits_processor"]()]
    return kwargs


def distribution(kwargs: dict) -> torch.Tensor:
    """``[216]`` probabilities of TEXTS, from the scores of transformers."""
    columns = iter(TEXTS.T)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "multinomial", lambda probs, num_samples: next(columns)[:, None])
        kwargs = dict(return_dict_in_generate=True, output_scores=True, **fresh(kwargs))
        output = six_token_model().generate(PROMPT.expand(len(TEXTS), -1), **kwargs)
    steps = torch.stack(output.scores, dim=1).double().softmax(dim=-1)
    return steps.gather(2, TEXTS[..., None])[..., 0].prod(dim=1)


def counts(sequences: torch.Tensor) -> torch.Tensor:
    cells = sequences[:, -LENGTH:] @ (VOCAB ** torch.arange(LENGTH - 1, -1, -1))
    return torch.bincount(cells, minlength=VOCAB**LENGTH)


class RandomTrees(Drafter):
    """Three of the six tokens, each followed by two."""

    PARENTS = torch.tensor([-1, 0, 0, 0, 1, 1, 2, 2, 3, 3])

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def propose(self, context):
        noise = torch.rand(4, len(context.rows), VOCAB, generator=self.generator)
        order = noise.argsort(dim=-1)
        drafts = [order[0, :, :3], *order[1:, :, :2]]
        tokens = torch.cat([context.roots[:, None], *drafts], dim=1)
        return DraftTree(tokens, self.PARENTS.expand_as(tokens))


def draw(kwargs: dict, rows: int, seed: int, drafter: Drafter):
    kwargs = dict(drafter=drafter, speculation="fixed", seed=seed, **fresh(kwargs))
    ids = PROMPT.expand(rows, -1)
    return specdec_ext.generate(six_token_model(), ids, return_dict_in_generate=True, **kwargs)


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.slow)
        for name in WARPERS
    ],
)
def test_texts_of_warpers_have_the_distribution_of_transformers(name):
    output = draw(WARPERS[name], DRAWS, 1, RandomTrees())
    assert output.speculation_stats.accepted_tokens > DRAWS / 8
    assert chi_square_excess(counts(output.sequences), distribution(WARPERS[name])) < 1


def drawn_in_fours(kwargs: dict, draws: int) -> torch.Tensor:
    """Counts of texts drawn four at a time, because rows of a stateful processor wait for each other."""
    drafter = DraftModelDrafter(six_token_model(), num_draft_tokens=2)
    outputs = [draw(kwargs, 4, seed, drafter) for seed in range(draws // 4)]
    accepted = sum(output.speculation_stats.accepted_tokens for output in outputs)
    assert accepted > draws / 8
    return sum(counts(output.sequences) for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_texts_of_stateful_processors_have_the_distribution_of_transformers(name):
    assert (
        chi_square_excess(drawn_in_fours(STATEFUL[name], DRAWS), distribution(STATEFUL[name])) < 1
    )


def test_few_texts_of_a_stateful_processor_have_its_distribution():
    few = drawn_in_fours(STATEFUL["momentum"], 320)
    assert chi_square_excess(few, distribution(STATEFUL["momentum"])) < 1
    assert chi_square_excess(few, distribution({})) > 1


@pytest.mark.parametrize("name", [name for name in {**WARPERS, **STATEFUL} if name != "none"])
def test_every_case_has_another_distribution_than_the_model(name):
    ours, plain = distribution({**WARPERS, **STATEFUL}[name]), distribution({})
    assert (ours - plain).abs().sum() > 0.05 and abs(ours.sum() - 1) < 1e-6


def test_temperature_that_differs_by_a_tenth_fails():
    output = draw(dict(temperature=0.8), DRAWS, 2, RandomTrees())
    assert chi_square_excess(counts(output.sequences), distribution(dict(temperature=0.8))) < 1
    assert chi_square_excess(counts(output.sequences), distribution(dict(temperature=0.9))) > 1
