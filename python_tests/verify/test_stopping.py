"""Rows end where plain decoding ends them, also inside an accepted block.

Claim: with end-of-sequence ids, length limits, stop strings and any stopping criteria the returned ids,
paddings included, are those of HF ``model.generate`` (greedy, float32) for every drafter, in a batch of one
and in a ragged batch of five. A criterion with state has the calls of plain decoding. The scripted drafters
also propose the text behind each end.
"""

import pytest
import torch
from helpers.models.tiny import (
    BATCHES,
    VOCAB,
    ScriptedDrafter,
    every_batch,
    every_drafter,
    generated,
    make_drafter,
    prompts,
    tiny_model,
)
from helpers.texts.stopping_cases import NEW_TOKENS, endless, letters_tokenizer, text_of
from transformers import GenerationConfig
from transformers.generation import stopping_criteria as hf
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

import specdec_ext

few_drafters = pytest.mark.parametrize(
    "drafter", ["none", "oracle_chain", "noisy_chain", "random_tree"]
)


def run(batch: str, drafter: str, **kwargs):
    """(ours, HF's) ids; values that are functions are called for each, so that each has its own object."""
    ids, mask, answers = endless(batch)
    model = tiny_model("llama")
    kwargs = {"max_new_tokens": NEW_TOKENS, **kwargs, "attention_mask": mask, "do_sample": False}

    def fresh() -> dict:
        return {name: value() if callable(value) else value for name, value in kwargs.items()}

    made = make_drafter(drafter, model, answers)
    ours = specdec_ext.generate(model, ids, drafter=made, speculation="fixed", **fresh())
    return ours, model.generate(ids, **fresh())


def check(batch: str, drafter: str, **kwargs) -> torch.LongTensor:
    """Check that our ids are those of HF, and return them."""
    ours, expected = run(batch, drafter, **kwargs)
    assert torch.equal(ours, expected)
    return ours


def ends_of(answers: list[list[int]], eos: int | list[int]) -> list[int]:
    """The number of tokens of each row if these ids end it."""
    ids = [eos] if isinstance(eos, int) else eos
    return [
        next((i + 1 for i, token in enumerate(row[:NEW_TOKENS]) if token in ids), NEW_TOKENS)
        for row in answers
    ]


# --- end-of-sequence ids and lengths


def eos_of(case: str, answers: list[list[int]]) -> int | list[int]:
    return {
        "one-id": answers[0][6],
        "id-of-the-first-token": answers[0][0],
        "several-ids": [answers[row][3 + 4 * row] for row in range(len(answers))],
        "every-first-token": [row[0] for row in answers],
        "far-apart": [answers[0][1], answers[-1][NEW_TOKENS - 2]],
        "never": next(
            token for token in range(1, VOCAB) if all(token not in row for row in answers)
        ),
    }[case]


EOS_CASES = ["one-id", "id-of-the-first-token", "several-ids"]
EOS_CASES += ["every-first-token", "far-apart", "never"]


@every_batch
@every_drafter
@pytest.mark.parametrize("case", EOS_CASES)
def test_end_of_sequence_ids_end_rows_as_in_transformers(case, drafter, batch):
    check(batch, drafter, eos_token_id=eos_of(case, endless(batch)[2]))


def test_cases_end_rows_early_late_and_on_their_first_token():
    answers = endless("five-ragged")[2]
    ends = {case: ends_of(answers, eos_of(case, answers)) for case in EOS_CASES}
    assert ends["one-id"][0] == 7 and max(ends["one-id"]) == NEW_TOKENS
    assert ends["id-of-the-first-token"][0] == 1
    assert len(set(ends["several-ids"])) > 2
    assert ends["every-first-token"] == [1] * 5
    assert ends["far-apart"][0] == 2 and ends["far-apart"][-1] == NEW_TOKENS - 1
    assert ends["never"] == [NEW_TOKENS] * 5


@every_batch
@few_drafters
@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_max_new_tokens_may_end_inside_a_block(limit, drafter, batch):
    assert check(batch, drafter, max_new_tokens=limit).shape[1] == max(BATCHES[batch]) + limit


@every_batch
@few_drafters
def test_max_length_counts_the_columns_of_the_prompt(drafter, batch):
    columns = max(BATCHES[batch]) + 5
    assert check(batch, drafter, max_new_tokens=None, max_length=columns).shape[1] == columns


@few_drafters
def test_max_length_criterion_may_be_shorter_than_max_new_tokens(drafter):
    def criteria():
        return StoppingCriteriaList([hf.MaxLengthCriteria(max_length=19)])

    assert check("five-ragged", drafter, stopping_criteria=criteria).shape[1] == 19


@every_batch
@few_drafters
@pytest.mark.parametrize("bound", [dict(min_new_tokens=9), dict(min_length=20)], ids=["new", "all"])
def test_rows_do_not_end_before_the_minimum(bound, drafter, batch):
    answers = endless(batch)[2]
    eos = sorted({token for row in answers for token in row[:6]})
    check(batch, drafter, eos_token_id=eos, **bound)


@every_drafter
def test_padding_token_may_be_an_end_of_sequence_id(drafter):
    eos = endless("five-ragged")[2][0][6]
    check("five-ragged", drafter, eos_token_id=eos, pad_token_id=eos)


class FrontRowOnly(specdec_ext.DraftModelDrafter):
    """Its drafts are wrong in all rows but the first."""

    def propose(self, context):
        tree = super().propose(context)
        others = torch.tensor([row != 0 for row in context.rows])[:, None]
        tokens = (tree.tokens + others.long()) % VOCAB
        tokens = torch.cat([tree.tokens[:, :1], tokens[:, 1:]], dim=1)
        return specdec_ext.DraftTree(tokens, tree.parents)


@every_drafter
@pytest.mark.parametrize("eos", ["no-eos", "eos"])
def test_row_ahead_does_not_exceed_learned_positions(eos, drafter):
    """GPT-2 has 256 positions: a row that is ahead of others must not be decoded or drafted behind them."""
    model = tiny_model("gpt2")
    ids, mask = prompts((244, 240, 3))
    kwargs = dict(attention_mask=mask, max_length=256, do_sample=False)
    if eos == "eos":
        kwargs["eos_token_id"] = VOCAB - 1
    expected = model.generate(ids, **kwargs)

    def front_row_first(right, rng):
        return [right] if right == answers[0][-len(right) :] or rng.random() < 0.3 else []

    answers = generated(expected, 244)
    made = make_drafter(drafter, model, answers)
    assert torch.equal(specdec_ext.generate(model, ids, drafter=made, **kwargs), expected)
    for ahead in (ScriptedDrafter(answers, front_row_first), FrontRowOnly(model)):
        assert torch.equal(specdec_ext.generate(model, ids, drafter=ahead, **kwargs), expected)


def test_row_far_ahead_waits_at_max_length():
    """One row accepts five tokens in a step, the other none, so they become 120 tokens apart."""
    model = tiny_model("llama")
    ids, mask = prompts((6, 6))
    kwargs = dict(attention_mask=mask, max_new_tokens=150, do_sample=False)
    expected = model.generate(ids, **kwargs)

    class OneRow(ScriptedDrafter):
        def propose(self, context):
            paths = [[] for _ in context.rows]
            if 0 in context.rows:
                done = len(context.generated[0])
                paths[context.rows.index(0)] = [self.answers[0][done : done + 5]]
            return specdec_ext.DraftTree.from_paths(context.roots, paths)

    kwargs |= dict(drafter=OneRow(generated(expected, 6), None), return_dict_in_generate=True)
    out = specdec_ext.generate(model, ids, **kwargs)
    assert torch.equal(out.sequences, expected)
    assert out.speculation_stats.emitted_tokens == 2 * 149  # no token behind the limit


# --- stop strings


def stop_strings_of(case: str, answers: list[list[int]]) -> str | list[str]:
    first, last = answers[0], answers[-1]
    return {
        "one-token": text_of(first[7:8]),
        "two-tokens": text_of(first[6:8]),
        "across-borders": text_of(first[5:9])[1:-1],  # begins and ends inside tokens
        "first-token": text_of(first[:1]),
        "several": [text_of(first[9:11])[1:], text_of(last[4:7])[1:-1]],
        "never": text_of([95, 95, 95]),
    }[case]


@every_batch
@few_drafters
@pytest.mark.parametrize("eos", [True, False], ids=["eos", "no-eos"])
@pytest.mark.parametrize(
    "case", ["one-token", "two-tokens", "across-borders", "first-token", "several", "never"]
)
def test_stop_strings_end_rows_as_in_transformers(case, eos, drafter, batch):
    answers = endless(batch)[2]
    kwargs = {"eos_token_id": answers[0][15]} if eos else {}
    strings = stop_strings_of(case, answers)
    check(batch, drafter, stop_strings=strings, tokenizer=letters_tokenizer, **kwargs)


def test_row_ends_with_the_token_that_completes_the_stop_string():
    answers = endless("one")[2][0]
    strings = stop_strings_of("across-borders", [answers])
    ours = check("one", "oracle_chain", stop_strings=strings, tokenizer=letters_tokenizer)
    assert ours[0, 7:].tolist() == answers[:9]


def test_stop_strings_of_the_generation_config_end_rows():
    ids, mask, answers = endless("one")
    strings = [stop_strings_of("two-tokens", answers)]
    config = GenerationConfig(max_new_tokens=20, stop_strings=strings)
    kwargs = dict(generation_config=config, tokenizer=letters_tokenizer())
    ours = specdec_ext.generate(tiny_model("llama"), ids, attention_mask=mask, **kwargs)
    assert ours[0, 7:].tolist() == answers[0][:8]
    assert config.stop_strings == strings  # the caller's object is unchanged


# --- criteria


class EndsOnMultiplesOfSeven(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


class SaysTrueOrFalse(StoppingCriteria):
    """An old kind of criterion with one answer for all rows, which transformers still accepts."""

    def __call__(self, input_ids, scores, **kwargs):
        return bool((input_ids[:, -1] % 7 == 0).any())


class Records(StoppingCriteria):
    """Has state: ends all rows at its ``limit``-th call, and keeps the texts of its calls."""

    def __init__(self, limit: int = 10**9):
        self.limit, self.calls = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.clone())
        return torch.full((len(input_ids),), len(self.calls) >= self.limit)


class EndsOnLowScore(StoppingCriteria):
    """Reads the last entry of ``scores``, which must belong to the last token."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append((input_ids.shape[1], len(scores)))
        best = scores[-1].max(dim=-1)
        return (best.indices == input_ids[:, -1]) & (best.values < 2.2)


@every_batch
@few_drafters
@pytest.mark.parametrize("eos", [True, False], ids=["eos", "no-eos"])
@pytest.mark.parametrize("kind", [EndsOnMultiplesOfSeven, SaysTrueOrFalse])
def test_criteria_without_state_end_rows_as_in_transformers(kind, eos, drafter, batch):
    """Without an end-of-sequence id finished rows run on until the last row ends."""
    kwargs = {"eos_token_id": endless(batch)[2][0][15]} if eos else {}
    check(batch, drafter, stopping_criteria=lambda: [kind()], **kwargs)


@every_batch
@few_drafters
@pytest.mark.parametrize("eos", [True, False], ids=["eos", "no-eos"])
def test_criterion_with_state_has_the_calls_of_plain_decoding(eos, drafter, batch):
    kwargs = {"eos_token_id": endless(batch)[2][0][4]} if eos and batch != "one" else {}
    seen: list[Records] = []

    def criteria():
        seen.append(Records(limit=11))
        return [seen[-1]]

    check(batch, drafter, stopping_criteria=criteria, **kwargs)
    our_calls, plain_calls = seen[0].calls, seen[1].calls
    assert len(our_calls) == len(plain_calls) == 11
    for mine, plain in zip(our_calls, plain_calls, strict=True):
        assert torch.equal(mine, plain)


@every_batch
@few_drafters
def test_criterion_reads_the_scores_of_plain_decoding(drafter, batch):
    seen: list[EndsOnLowScore] = []

    def criteria():
        seen.append(EndsOnLowScore())
        return [seen[-1]]

    kwargs = dict(return_dict_in_generate=True, output_scores=True, eos_token_id=VOCAB - 1)
    ours, expected = run(batch, drafter, stopping_criteria=criteria, **kwargs)
    assert torch.equal(ours.sequences, expected.sequences)
    assert seen[0].lengths == seen[1].lengths


@every_batch
@few_drafters
def test_call_without_time_emits_one_token(drafter, batch):
    assert check(batch, drafter, max_time=0.0).shape[1] == max(BATCHES[batch]) + 1


@few_drafters
def test_clock_is_read_once_per_token(drafter, monkeypatch):
    """Each reading is a tick, so seven tokens take seven ticks."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(hf.time, "time", lambda: next(ticks))
    ids, mask, answers = endless("one")
    model = tiny_model("llama")
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS)
    kwargs |= dict(stopping_criteria=[hf.MaxTimeCriteria(max_time=6.5)])
    made = make_drafter(drafter, model, answers)
    ours = specdec_ext.generate(model, ids, drafter=made, **kwargs)
    assert generated(ours, 7)[0] == answers[0][:7]
