"""Rows end exactly where plain generation ends them, also in the middle of an accepted block.

Claim: with end-of-sequence ids, length limits, stop strings and stopping criteria of any kind the returned
ids equal those of HF ``model.generate`` (greedy, float32), token for token and padding for padding, for every
drafter at batch 1 and at batch 5 ragged; and a criterion that counts its calls is called as often, with the
same text, as by plain decoding. The scripted drafters know the text that goes on beyond every stop.
"""

import pytest
import torch
from stopping_cases import BATCHES, NEW_TOKENS, endless, letters_tokenizer, text_of
from tiny import DRAFTERS, VOCAB, ScriptedDrafter, generated, make_drafter, prompts, tiny_model
from transformers import GenerationConfig
from transformers.generation import stopping_criteria as hf
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

import specdec_ext

every_batch = pytest.mark.parametrize("batch", BATCHES)
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


def run(batch: str, drafter: str, **kwargs):
    """(ours, HF's) ids; keyword values that are callables without arguments are made anew for each."""
    ids, mask, answers = endless(batch)
    model = tiny_model("llama")
    kwargs = {"max_new_tokens": NEW_TOKENS, **kwargs, "attention_mask": mask, "do_sample": False}

    def fresh() -> dict:
        return {name: value() if callable(value) else value for name, value in kwargs.items()}

    ours = specdec_ext.generate(
        model, ids, drafter=make_drafter(drafter, model, answers), speculation="fixed", **fresh()
    )
    return ours, model.generate(ids, **fresh())


def ends_of(answers: list[list[int]], eos: int | list[int]) -> list[int]:
    """How many tokens each row has if these ids end it."""
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


EOS_CASES = [
    "one-id",
    "id-of-the-first-token",
    "several-ids",
    "every-first-token",
    "far-apart",
    "never",
]


@every_batch
@every_drafter
@pytest.mark.parametrize("case", EOS_CASES)
def test_end_of_sequence(case, drafter, batch):
    eos = eos_of(case, endless(batch)[2])
    ours, expected = run(batch, drafter, eos_token_id=eos)
    assert torch.equal(ours, expected)


def test_the_eos_cases_are_what_they_say():
    """Rows end early, late and on their first token: otherwise the equality above is empty."""
    answers = endless("five-ragged")[2]
    ends = {case: ends_of(answers, eos_of(case, answers)) for case in EOS_CASES}
    assert ends["one-id"][0] == 7 and max(ends["one-id"]) == NEW_TOKENS
    assert ends["id-of-the-first-token"][0] == 1
    assert len(set(ends["several-ids"])) > 2
    assert ends["every-first-token"] == [1] * 5
    assert ends["far-apart"][0] == 2 and ends["far-apart"][-1] == NEW_TOKENS - 1
    assert ends["never"] == [NEW_TOKENS] * 5


@every_batch
@every_drafter
@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_max_new_tokens_inside_a_block(limit, drafter, batch):
    ours, expected = run(batch, drafter, max_new_tokens=limit)
    assert torch.equal(ours, expected)
    assert ours.shape[1] == max(BATCHES[batch]) + limit


@every_batch
@every_drafter
def test_max_length_counts_the_columns_of_the_prompt(drafter, batch):
    columns = max(BATCHES[batch]) + 5
    ours, expected = run(batch, drafter, max_new_tokens=None, max_length=columns)
    assert torch.equal(ours, expected)
    assert ours.shape[1] == columns


@every_drafter
def test_a_max_length_criterion_shorter_than_max_new_tokens(drafter):
    def criteria():
        return StoppingCriteriaList([hf.MaxLengthCriteria(max_length=19)])

    ours, expected = run("five-ragged", drafter, stopping_criteria=criteria)
    assert torch.equal(ours, expected)
    assert ours.shape[1] == 19


@every_batch
@every_drafter
@pytest.mark.parametrize("bound", [dict(min_new_tokens=9), dict(min_length=20)], ids=["new", "all"])
def test_no_end_of_sequence_before_the_minimum(bound, drafter, batch):
    answers = endless(batch)[2]
    eos = sorted({token for row in answers for token in row[:6]})
    ours, expected = run(batch, drafter, eos_token_id=eos, **bound)
    assert torch.equal(ours, expected)


@every_drafter
def test_eos_as_padding_token(drafter):
    eos = endless("five-ragged")[2][0][6]
    ours, expected = run("five-ragged", drafter, eos_token_id=eos, pad_token_id=eos)
    assert torch.equal(ours, expected)


class FrontRowOnly(specdec_ext.DraftModelDrafter):
    """Spoils the drafts of all rows but the first."""

    def propose(self, context):
        tree = super().propose(context)
        others = torch.tensor([row != 0 for row in context.rows])[:, None]
        tokens = (tree.tokens + others.long()) % VOCAB
        return specdec_ext.DraftTree(
            torch.cat([tree.tokens[:, :1], tokens[:, 1:]], 1), tree.parents
        )


@every_drafter
@pytest.mark.parametrize("eos", ["no-eos", "eos"])
def test_learned_positions_are_not_exceeded_by_the_row_in_front(eos, drafter):
    """GPT-2 has 256 positions: a row that is ahead must not be decoded, nor drafted, past them.

    Without an end-of-sequence id finished rows used to run on past ``max_length`` until the slowest row was
    there; and the draft model drafted the front row to the depth that the slowest row still needed.
    """
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


def test_a_row_far_ahead_waits_at_max_length():
    """One row accepts five tokens a step, the other none: 120 apart, more than the slack of the buffers."""
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

    out = specdec_ext.generate(
        model,
        ids,
        drafter=OneRow(generated(expected, 6), None),
        return_dict_in_generate=True,
        **kwargs,
    )
    assert torch.equal(out.sequences, expected)
    assert out.speculation_stats.emitted_tokens == 2 * 149  # nothing is decoded beyond the limit


# --- stop strings


def stop_strings_of(case: str, answers: list[list[int]]) -> str | list[str]:
    first, last = answers[0], answers[-1]
    return {
        "one-token": text_of(first[7:8]),
        "two-tokens": text_of(first[6:8]),
        "across-borders": text_of(first[5:9])[1:-1],  # from inside one token to inside another
        "first-token": text_of(first[:1]),
        "several": [text_of(first[9:11])[1:], text_of(last[4:7])[1:-1]],
        "never": text_of([95, 95, 95]),
    }[case]


@every_batch
@every_drafter
@pytest.mark.parametrize("eos", [True, False], ids=["eos", "no-eos"])
@pytest.mark.parametrize(
    "case", ["one-token", "two-tokens", "across-borders", "first-token", "several", "never"]
)
def test_stop_strings(case, eos, drafter, batch):
    kwargs = dict(
        stop_strings=stop_strings_of(case, endless(batch)[2]), tokenizer=letters_tokenizer()
    )
    if eos:
        kwargs["eos_token_id"] = endless(batch)[2][0][15]
    kwargs["tokenizer"] = letters_tokenizer  # made by the call, as every callable
    ours, expected = run(batch, drafter, **kwargs)
    assert torch.equal(ours, expected)


def test_a_stop_string_ends_the_row_with_the_token_that_completes_it():
    answers = endless("one")[2][0]
    ours, _ = run(
        "one",
        "oracle_chain",
        stop_strings=stop_strings_of("across-borders", [answers]),
        tokenizer=letters_tokenizer,
    )
    assert ours[0, 7:].tolist() == answers[:9]


def test_stop_strings_in_the_generation_config():
    answers = endless("one")[2]
    ids, mask, _ = endless("one")
    config = GenerationConfig(
        max_new_tokens=20, stop_strings=[stop_strings_of("two-tokens", answers)]
    )
    ours = specdec_ext.generate(
        tiny_model("llama"),
        ids,
        attention_mask=mask,
        generation_config=config,
        tokenizer=letters_tokenizer(),
    )
    assert ours[0, 7:].tolist() == answers[0][:8]
    assert config.stop_strings is not None  # the caller's object is left as it was


# --- criteria


class EndsOnMultiplesOfSeven(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


class SaysTrueOrFalse(StoppingCriteria):
    """The way criteria were written before they had to answer per row; transformers still takes it."""

    def __call__(self, input_ids, scores, **kwargs):
        return bool((input_ids[:, -1] % 7 == 0).any())


class Records(StoppingCriteria):
    """Keeps state: ends all rows at its ``limit``-th call, and remembers the texts it was shown."""

    def __init__(self, limit: int = 10**9):
        self.limit, self.calls = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.clone())
        return torch.full((len(input_ids),), len(self.calls) >= self.limit)


class EndsOnLowScore(StoppingCriteria):
    """Reads the newest entry of ``scores``, which must belong to the token that was just emitted."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append((input_ids.shape[1], len(scores)))
        best = scores[-1].max(dim=-1)
        return (best.indices == input_ids[:, -1]) & (best.values < 2.2)


@every_batch
@every_drafter
@pytest.mark.parametrize("eos", [True, False], ids=["eos", "no-eos"])
@pytest.mark.parametrize("kind", [EndsOnMultiplesOfSeven, SaysTrueOrFalse])
def test_custom_criteria_without_state(kind, eos, drafter, batch):
    """Without an end-of-sequence id transformers pads nothing: finished rows run on to the last one's end."""
    kwargs = {"eos_token_id": endless(batch)[2][0][15]} if eos else {}
    ours, expected = run(batch, drafter, stopping_criteria=lambda: [kind()], **kwargs)
    assert torch.equal(ours, expected)


@every_batch
@every_drafter
@pytest.mark.parametrize("eos", [True, False], ids=["eos", "no-eos"])
def test_a_criterion_with_state_sees_what_plain_decoding_shows(eos, drafter, batch):
    kwargs = {"eos_token_id": endless(batch)[2][0][4]} if eos and batch != "one" else {}
    seen: list[Records] = []

    def criteria():
        seen.append(Records(limit=11))
        return [seen[-1]]

    ours, expected = run(batch, drafter, stopping_criteria=criteria, **kwargs)
    assert torch.equal(ours, expected)
    our_calls, plain_calls = seen[0].calls, seen[1].calls
    assert len(our_calls) == len(plain_calls) == 11
    for mine, plain in zip(our_calls, plain_calls, strict=True):
        assert torch.equal(mine, plain)


@every_batch
@every_drafter
def test_a_criterion_may_look_at_the_score_of_the_newest_token(drafter, batch):
    """Inside a block ``scores`` used to end where the block began."""
    seen: list[EndsOnLowScore] = []

    def criteria():
        seen.append(EndsOnLowScore())
        return [seen[-1]]

    ours, expected = run(
        batch,
        drafter,
        stopping_criteria=criteria,
        eos_token_id=VOCAB - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert torch.equal(ours.sequences, expected.sequences)
    assert seen[0].lengths == seen[1].lengths


@every_batch
@every_drafter
def test_no_time_left(drafter, batch):
    """A row always gets the token of its prompt, as in plain decoding."""
    ours, expected = run(batch, drafter, max_time=0.0)
    assert torch.equal(ours, expected)
    assert ours.shape[1] == max(BATCHES[batch]) + 1


@every_drafter
def test_max_time_is_looked_at_once_per_token(drafter, monkeypatch):
    """The clock ticks at every look: seven tokens in seven ticks, wherever the blocks end."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(hf.time, "time", lambda: next(ticks))
    ids, mask, answers = endless("one")
    model = tiny_model("llama")
    criteria = [hf.MaxTimeCriteria(max_time=6.5)]
    ours = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        drafter=make_drafter(drafter, model, answers),
        stopping_criteria=criteria,
    )
    assert generated(ours, 7)[0] == answers[0][:7]
