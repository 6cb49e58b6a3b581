"""A streamer gets the prompt, then one ``[batch]`` of tokens per position, in order, and one ``end()``.

Claim: with every draft the streamed columns are those of the returned ids, with paddings for finished rows; a
position is streamed when every unfinished row has reached it; nothing is streamed twice or after the end.
Transformers' own streamers work at batch 1, and ``put_drafted`` also tells which tokens were accepted drafts.
"""

import pytest
import torch
from helpers.models.tiny import (
    BATCHES,
    ScriptedDrafter,
    every_batch,
    every_drafter,
    generated,
    make_drafter,
    oracle_chain,
    tiny_model,
)
from helpers.texts.stopping_cases import endless, letters_tokenizer, text_of
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

import specdec_ext

NEW_TOKENS = 20


class Log(BaseStreamer):
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert self.ends == 0
        self.puts.append(value.clone())

    def end(self):
        self.ends += 1

    def check(self, sequences: torch.Tensor, prompt_columns: int) -> None:
        """Check all calls against the sequences that ``generate`` returned."""
        assert self.ends == 1
        prompt, *columns = self.puts
        assert torch.equal(prompt, sequences[:, :prompt_columns])
        assert len(columns) == sequences.shape[1] - prompt_columns
        for column, expected in zip(columns, sequences[:, prompt_columns:].T, strict=True):
            assert column.device.type == "cpu" and column.dtype == torch.long
            assert torch.equal(column, expected)


class DraftedLog(Log):
    def __init__(self):
        super().__init__()
        self.flags = []

    def put_drafted(self, tokens, drafted):
        assert drafted.dtype == torch.bool and drafted.shape == tokens.shape
        self.put(tokens)
        self.flags.append(drafted)


def run(batch: str, drafter, streamer, way: str = "generate", **kwargs) -> torch.Tensor:
    ids, mask, answers = endless(batch)
    model = tiny_model("llama")
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False) | kwargs
    made = make_drafter(drafter, model, answers) if isinstance(drafter, str) else drafter
    options = {"drafter": made, "speculation": "fixed", "streamer": streamer}
    if way == "generate":
        return specdec_ext.generate(model, ids, **options, **kwargs)
    hook = specdec_ext.custom_generate(**options)
    return model.generate(ids, custom_generate=hook, **kwargs)


class FourthOrSeventh(torch.nn.Module):
    """Ends rows at different columns; without an end-of-sequence id finished rows run on."""

    def forward(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 3


ENDS = {
    "limit": {},
    "eos": lambda answers: {"eos_token_id": [answers[0][3], answers[-1][9]]},
    "first-token": lambda answers: {"eos_token_id": [row[0] for row in answers]},
    "criterion-without-eos": {"stopping_criteria": [FourthOrSeventh()]},
    "one-token": {"max_new_tokens": 1},
}


@every_batch
@pytest.mark.parametrize("drafter", ["none", "oracle_chain", "noisy_chain", "random_tree"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", [Log, DraftedLog])
def test_streamed_columns_are_those_of_the_returned_ids(kind, end, drafter, batch):
    kwargs = ENDS[end] if isinstance(ENDS[end], dict) else ENDS[end](endless(batch)[2])
    streamer = kind()
    sequences = run(batch, drafter, streamer, **kwargs)
    streamer.check(sequences, max(BATCHES[batch]))


@every_batch
@pytest.mark.parametrize("drafter", ["none", "noisy_chain", "random_tree"])
def test_hook_streams_the_returned_ids(drafter, batch):
    streamer = Log()
    sequences = run(batch, drafter, streamer, "hook", eos_token_id=endless(batch)[2][0][5])
    streamer.check(sequences, max(BATCHES[batch]))


def test_row_ahead_is_not_streamed_behind_the_returned_text():
    """Stop strings end the rows, which are columns apart when the last one ends."""
    answers = endless("five-ragged")[2]
    ids, mask, _ = endless("five-ragged")
    model = tiny_model("llama")
    strings = [text_of(row[2 + i : 4 + i]) for i, row in enumerate(answers)]

    class FrontRows(ScriptedDrafter):
        def propose(self, context):
            paths = [
                [self.answers[row][len(context.generated[row]) :][:6]] if row < 2 else []
                for row in context.rows
            ]
            return specdec_ext.DraftTree.from_paths(context.roots, paths)

    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    kwargs.update(stop_strings=strings, tokenizer=letters_tokenizer())
    streamer, drafter = Log(), FrontRows(answers, None)
    actual = specdec_ext.generate(model, ids, drafter=drafter, streamer=streamer, **kwargs)
    assert torch.equal(actual, model.generate(ids, **kwargs))
    assert actual.shape[1] < 12 + NEW_TOKENS
    streamer.check(actual, 12)


@pytest.mark.parametrize("drafter", ["none", "ngram", "noisy_chain", "random_tree"])
def test_positions_are_streamed_as_soon_as_all_unfinished_rows_have_them(drafter):
    answers = endless("five-ragged")[2]
    eos = answers[0][3]
    streamer, lags = Log(), []
    inner = make_drafter(drafter, tiny_model("llama"), answers)

    class Watching(specdec_ext.Drafter):
        def start(self, context, model, output):
            if inner:
                inner.start(context, model, output)

        def propose(self, context):
            slowest = min(len(context.generated[row]) for row in context.rows)
            lags.append(slowest - (len(streamer.puts) - 1))
            return inner.propose(context) if inner else specdec_ext.DraftTree.root(context.roots)

        def commit(self, context, accepted, output):
            if inner:
                inner.commit(context, accepted, output)

    sequences = run("five-ragged", Watching(), streamer, eos_token_id=eos)
    streamer.check(sequences, 12)
    assert len(lags) > 3 and set(lags) == {0}


def test_flags_of_a_worked_example():
    """After the token of the prompt, blocks have four accepted drafts and one more token."""
    streamer = DraftedLog()
    run("one", "oracle_chain", streamer, max_new_tokens=12)
    flags = [bool(flag) for flag in torch.cat(streamer.flags)]
    assert flags == [False] + ([True] * 4 + [False]) * 2 + [False]


@every_batch
@every_drafter
def test_flags_agree_with_the_counters(drafter, batch):
    streamer = DraftedLog()
    out = run(batch, drafter, streamer, return_dict_in_generate=True, eos_token_id=96)
    drafted = torch.stack(streamer.flags, dim=1)
    assert int(drafted.sum()) == out.speculation_stats.accepted_tokens
    assert not drafted[:, 0].any()  # the prompt's own token


def test_paddings_are_not_flagged():
    answers = endless("five-ragged")[2]
    streamer = DraftedLog()
    ends = dict(eos_token_id=answers[0][2], pad_token_id=5)
    sequences = run("five-ragged", "oracle_chain", streamer, **ends)
    after_end = torch.stack(streamer.flags, dim=1)[0, 3:]
    assert (sequences[0, 15:] == 5).all() and not after_end.any()


@every_drafter
def test_text_streamer_prints_the_text(drafter, capsys):
    tokenizer = letters_tokenizer()
    sequences = run("one", drafter, TextStreamer(tokenizer, skip_prompt=True))
    printed = capsys.readouterr().out
    assert printed.strip() == text_of(generated(sequences, 7)[0])


def test_text_streamers_refuse_batches_themselves():
    with pytest.raises(ValueError, match="only supports batch size 1"):
        run("five-ragged", "none", TextStreamer(letters_tokenizer()))


def test_streamer_gets_the_values_of_hf():
    ids, mask, _ = endless("five-ragged")
    theirs, mine = Log(), Log()
    kwargs = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    model = tiny_model("llama")
    model.generate(ids, streamer=theirs, **kwargs)
    drafter = ScriptedDrafter(endless("five-ragged")[2], oracle_chain)
    specdec_ext.generate(model, ids, streamer=mine, drafter=drafter, **kwargs)
    assert theirs.ends == mine.ends == 1 and len(theirs.puts) == len(mine.puts)
    for a, b in zip(theirs.puts, mine.puts, strict=True):
        assert torch.equal(a, b)
