"""A streamer gets the prompt, then one ``[batch]`` of tokens per position, in order, and one ``end()``.

Claim: whatever is drafted, what is put equals the columns of the returned ids, finished rows as paddings; a
position is put once every unfinished row has reached it; nothing is put twice or after the end. transformers'
own streamers work at batch 1, and ``put_drafted`` also says which tokens were accepted drafts.
"""

import threading

import pytest
import torch
from stopping_cases import endless, letters_tokenizer, text_of
from tiny import DRAFTERS, ScriptedDrafter, generated, make_drafter, oracle_chain, tiny_model
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import specdec_ext

BATCHES = {"one": (7,), "five-ragged": (12, 3, 9, 5, 12)}
NEW_TOKENS = 20

every_batch = pytest.mark.parametrize("batch", BATCHES)
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


class Log(BaseStreamer):
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert self.ends == 0
        self.puts.append(value.clone())

    def end(self):
        self.ends += 1

    def check(self, sequences: torch.Tensor, prompt_columns: int) -> None:
        """The whole contract, given what ``generate`` returned."""
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


def run(batch: str, drafter, streamer, door: str = "generate", **kwargs) -> torch.Tensor:
    ids, mask, answers = endless(batch)
    model = tiny_model("llama")
    kwargs = {
        "attention_mask": mask,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        **kwargs,
    }
    made = make_drafter(drafter, model, answers) if isinstance(drafter, str) else drafter
    options = {"drafter": made, "speculation": "fixed", "streamer": streamer}
    if door == "generate":
        return specdec_ext.generate(model, ids, **options, **kwargs)
    hook = specdec_ext.custom_generate(**options)
    return model.generate(ids, custom_generate=hook, **kwargs)


class FourthOrSeventh(torch.nn.Module):
    """Ends rows at different columns; without an end-of-sequence id the finished ones run on."""

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
@every_drafter
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", [Log, DraftedLog])
def test_the_contract(kind, end, drafter, batch):
    kwargs = ENDS[end] if isinstance(ENDS[end], dict) else ENDS[end](endless(batch)[2])
    streamer = kind()
    sequences = run(batch, drafter, streamer, **kwargs)
    streamer.check(sequences, max(BATCHES[batch]))


@every_batch
@pytest.mark.parametrize("drafter", ["none", "noisy_chain", "random_tree"])
def test_the_contract_through_the_hook(drafter, batch):
    streamer = Log()
    sequences = run(batch, drafter, streamer, "hook", eos_token_id=endless(batch)[2][0][5])
    streamer.check(sequences, max(BATCHES[batch]))


def test_stop_strings_that_end_rows_which_others_have_passed():
    """No end-of-sequence id, only row-independent criteria: rows are columns apart when the last one ends.

    The row in front used to be streamed past the end of the returned text.
    """
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
    streamer = Log()
    actual = specdec_ext.generate(
        model, ids, drafter=FrontRows(answers, None), streamer=streamer, **kwargs
    )
    assert torch.equal(actual, model.generate(ids, **kwargs))
    assert actual.shape[1] < 12 + NEW_TOKENS
    streamer.check(actual, 12)


@pytest.mark.parametrize("drafter", ["none", "ngram", "noisy_chain", "random_tree"])
def test_positions_are_put_as_soon_as_all_unfinished_rows_have_them(drafter):
    """After every target pass the streamer is where the slowest unfinished row is, not behind."""
    answers = endless("five-ragged")[2]
    eos = answers[0][3]
    streamer, lags = Log(), []
    inner = make_drafter(drafter, tiny_model("llama"), answers)

    class Watching(specdec_ext.Drafter):
        def start(self, context, model, output):
            if inner is not None:
                inner.start(context, model, output)

        def propose(self, context):
            slowest = min(len(context.generated[row]) for row in context.rows)
            lags.append(slowest - (len(streamer.puts) - 1))
            return (
                specdec_ext.DraftTree.root(context.roots)
                if inner is None
                else inner.propose(context)
            )

        def commit(self, context, accepted, output):
            if inner is not None:
                inner.commit(context, accepted, output)

    sequences = run("five-ragged", Watching(), streamer, eos_token_id=eos)
    streamer.check(sequences, 12)
    assert len(lags) > 3 and set(lags) == {0}


def test_which_tokens_were_drafted():
    """Blocks of four drafts and a bonus, after the token of the prompt."""
    streamer = DraftedLog()
    run("one", "oracle_chain", streamer, max_new_tokens=12)
    flags = [bool(flag) for flag in torch.cat(streamer.flags)]
    assert flags == [False] + ([True] * 4 + [False]) * 2 + [False]


@every_batch
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafted_flags_agree_with_the_counters(drafter, batch):
    streamer = DraftedLog()
    out = run(batch, drafter, streamer, return_dict_in_generate=True, eos_token_id=96)
    drafted = torch.stack(streamer.flags, dim=1)
    assert int(drafted.sum()) == out.speculation_stats.accepted_tokens
    assert not drafted[:, 0].any()  # the prompt's own token


def test_paddings_of_finished_rows_are_not_drafted():
    answers = endless("five-ragged")[2]
    streamer = DraftedLog()
    sequences = run(
        "five-ragged", "oracle_chain", streamer, eos_token_id=answers[0][2], pad_token_id=5
    )
    after_end = torch.stack(streamer.flags, dim=1)[0, 3:]
    assert (sequences[0, 15:] == 5).all() and not after_end.any()


@every_drafter
def test_text_streamer_prints_the_text(drafter, capsys):
    tokenizer = letters_tokenizer()
    sequences = run("one", drafter, TextStreamer(tokenizer, skip_prompt=True))
    printed = capsys.readouterr().out
    assert printed.strip() == text_of(generated(sequences, 7)[0])


@pytest.mark.parametrize("door", ["generate", "hook"])
@pytest.mark.parametrize("drafter", ["none", "noisy_chain", "random_tree"])
def test_text_iterator_streamer_from_another_thread(drafter, door):
    """Masks are chosen per thread, so a call in a thread is a call like any other; the iterator must end."""
    streamer = TextIteratorStreamer(letters_tokenizer(), skip_prompt=True, timeout=20)
    result = []
    thread = threading.Thread(target=lambda: result.append(run("one", drafter, streamer, door)))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == text_of(generated(result[0], 7)[0])


def test_text_streamers_refuse_batches_themselves():
    with pytest.raises(ValueError, match="only supports batch size 1"):
        run("five-ragged", "none", TextStreamer(letters_tokenizer()))


def test_without_a_drafter_the_streamer_of_hf_gets_the_same():
    ids, mask, _ = endless("five-ragged")
    theirs, mine = Log(), Log()
    kwargs = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    model = tiny_model("llama")
    # transformers' own call puts [batch] tensors, too
    model.generate(ids, streamer=theirs, **kwargs)
    specdec_ext.generate(
        model,
        ids,
        streamer=mine,
        drafter=ScriptedDrafter(endless("five-ragged")[2], oracle_chain),
        **kwargs,
    )
    assert theirs.ends == mine.ends == 1 and len(theirs.puts) == len(mine.puts)
    for a, b in zip(theirs.puts, mine.puts, strict=True):
        assert torch.equal(a, b)


def test_an_error_in_the_streamer_reaches_the_caller_and_the_next_call_works():
    class Broken(Log):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 4:
                raise RuntimeError("the line is gone")

    with pytest.raises(RuntimeError, match="the line is gone"):
        run("five-ragged", "random_tree", Broken())
    streamer = Log()
    streamer.check(run("five-ragged", "random_tree", streamer), 12)
