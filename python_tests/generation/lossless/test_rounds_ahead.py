"""Rounds that start before the host has read the last one: text, statistics and cache stay the same."""

from __future__ import annotations

import pytest
import torch
from helpers.checks.lossless import NEW_TOKENS, counters, generate, late_ends, plain_text
from helpers.drafters.every_drafter import AHEAD
from helpers.models.tiny import (
    BATCHES,
    VOCAB,
    ScriptedDrafter,
    oracle_chain,
    prompts,
)
from helpers.texts.stopping_cases import letters_tokenizer, text_of
from transformers import GPT2Config, GPT2LMHeadModel, StoppingCriteria

import specdec_ext
from specdec_ext import NgramDrafter
from specdec_ext.decoding.loop import DecodingLoop
from specdec_ext.models.slots import SlotTarget
from specdec_ext.models.slots.runner import PassRunner
from specdec_ext.verify.sampler import Sampler

pytestmark = pytest.mark.usefixtures("fresh_arena", "by_modules")
every_drafter = pytest.mark.parametrize("name", AHEAD)
every_batch = pytest.mark.parametrize("batch", ["one", "five-ragged"])


@pytest.fixture
def events(monkeypatch):
    """``("start" or "read", number of the round)``, in order."""
    log = []
    round_launched, read = SlotTarget.round_launched, Sampler.read

    def started(*args):
        committed = round_launched(*args)
        log.append(("start", committed.number))
        return committed

    def was_read(self, committed, *args):
        log.append(("read", committed.number))
        return read(self, committed, *args)

    monkeypatch.setattr(SlotTarget, "round_launched", started)
    monkeypatch.setattr(Sampler, "read", was_read)
    return log


def started_ahead(events):
    """The numbers of the rounds after which the next one was started before they were read."""
    place = {event: i for i, event in enumerate(events)}
    reads = [number for kind, number in events if kind == "read"]
    return [n for n in reads if place.get(("start", n + 1), len(events)) < place["read", n]]


def check_same_cache(ours, theirs):
    pairs = zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine.keys, other.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(mine.values, other.values, rtol=0, atol=1e-5)


@every_batch
@every_drafter
def test_round_starts_before_the_last_one_is_read(name, batch, events):
    generate(AHEAD[name](), batch, "greedy", graphs=True, speculation="fixed")
    reads = [number for kind, number in events if kind == "read"]
    assert reads == list(range(1, len(reads) + 1))
    assert len(started_ahead(events)) > 3
    place = {event: i for i, event in enumerate(events)}
    # No round is started twice ahead, and at most one in vain.
    for number in reads:
        assert place.get(("start", number + 2), len(events)) > place["read", number]
    assert len([kind for kind, _ in events if kind == "start"]) <= len(reads) + 1


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
@every_batch
@every_drafter
def test_text_statistics_and_cache_are_those_of_rounds_in_turn(name, batch, decoding, events):
    """Rows end at the maximum length, and by an end-of-sequence id while the next round has been started."""
    for kwargs in ({}, late_ends(batch, decoding)):
        events.clear()
        ours, theirs = (
            generate(AHEAD[name](), batch, decoding, graphs=graphs, speculation="fixed", **kwargs)
            for graphs in (True, False)
        )
        assert events
        assert torch.equal(ours.sequences, theirs.sequences)
        assert counters(ours) == counters(theirs)
        check_same_cache(ours, theirs)


def stops(batch, decoding):
    """Stop strings that end every second row, each at another round; the others end at the maximum length."""
    new = plain_text(batch, decoding)[:, -NEW_TOKENS:]
    unused = next(token for token in range(VOCAB) if token not in new)
    strings = [text_of(row[12 + 4 * i : 14 + 4 * i].tolist())[1:] for i, row in enumerate(new[::2])]
    return dict(
        stop_strings=strings,
        tokenizer=letters_tokenizer(),
        eos_token_id=unused,
        pad_token_id=unused,
    )


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
@every_batch
@every_drafter
def test_stop_strings_end_rows_one_round_late(name, batch, decoding, events):
    generate(AHEAD[name](), batch, decoding, graphs=True, speculation="fixed")  # records passes
    events.clear()
    kwargs = dict(speculation="fixed", **stops(batch, decoding))
    ours, theirs = (
        generate(AHEAD[name](), batch, decoding, graphs=graphs, **kwargs)
        for graphs in (True, False)
    )
    assert started_ahead(events)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.speculation_stats.emitted_tokens < len(ours.sequences) * (NEW_TOKENS - 1)
    assert counters(ours) == counters(theirs)
    check_same_cache(ours, theirs)


class Records(StoppingCriteria):
    """Keeps what it was given, and ends the text at its call number ``limit``."""

    def __init__(self, limit):
        self.limit, self.texts = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        self.texts.append((input_ids.tolist(), scores))
        return torch.full((len(input_ids),), len(self.texts) >= self.limit)


@pytest.mark.parametrize("eos", [None, 0])
@every_drafter
def test_criterion_with_memory_has_the_calls_of_plain_decoding(name, eos, events):
    """For one row; rows of a batch must wait for each other, so there the host decides."""
    seen = {}
    for graphs in (True, False):
        seen[graphs] = Records(limit=11)
        kwargs = dict(stopping_criteria=[seen[graphs]], eos_token_id=eos, pad_token_id=0)
        generate(AHEAD[name](), "one", "greedy", graphs=graphs, speculation="fixed", **kwargs)
    assert seen[True].texts == seen[False].texts
    assert len(seen[True].texts) == 11
    assert started_ahead(events)
    events.clear()
    kwargs |= dict(stopping_criteria=[Records(limit=11)])
    generate(AHEAD[name](), "five-ragged", "greedy", graphs=True, speculation="fixed", **kwargs)
    assert not events


def test_rows_go_on_after_their_end_without_an_end_of_sequence_id(events):
    """As in transformers, until the last row ends; so the host decides where a row ends."""
    kwargs = dict(stops("five-ragged", "greedy"), eos_token_id=None, speculation="fixed")
    ours, theirs = (
        generate(AHEAD["ngram"](), "five-ragged", "greedy", graphs=graphs, **kwargs)
        for graphs in (True, False)
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    assert not events


class Oracle(ScriptedDrafter):
    """Is told what was emitted, on the host and on the device alike."""

    def __init__(self, answers):
        super().__init__(answers, oracle_chain)

    def commit(self, context, accepted, output):
        kept = [len(tokens) - 1 for tokens in accepted.emitted]
        assert accepted.num_accepted.tolist() == kept


def test_stop_strings_end_all_rows_in_one_round_after_different_tokens(events):
    """The device knows neither the last tokens nor the lengths of these rows."""
    answers = plain_text("five-ragged", "greedy")[:, -NEW_TOKENS:].tolist()
    strings = [text_of(row[1 + i % 3 : 3 + i % 3])[1:] for i, row in enumerate(answers)]
    kwargs = dict(stops("five-ragged", "greedy"), stop_strings=strings, speculation="fixed")
    ours, theirs = (
        generate(Oracle(answers), "five-ragged", "greedy", graphs=graphs, **kwargs)
        for graphs in (True, False)
    )
    assert [kind for kind, _ in events] == ["start", "read"]
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len((ours.sequences == kwargs["pad_token_id"]).sum(dim=1).unique()) > 1
    check_same_cache(ours, theirs)


@every_drafter
def test_row_that_a_stop_string_ended_does_not_spoil_the_others(name, events, monkeypatch):
    """The model gives NaN after the stop string, in the round that was started before the host found it."""
    kwargs = dict(speculation="fixed", **stops("five-ragged", "greedy"))
    expected = generate(None, "five-ragged", "greedy", **kwargs).sequences
    lengths = BATCHES["five-ragged"]
    new = expected[:, max(lengths) :] != kwargs["pad_token_id"]
    ends = [prompt + int(row.sum()) for prompt, row in zip(lengths, new, strict=True)]
    original, spoilt = DecodingLoop._computed, []

    def computed(self, tree, root_positions=None, match_lengths=None):
        forward = SlotTarget.forward

        def spoiling(target, tree):
            output = forward(target, tree)
            for i, row in enumerate(self.context.rows):
                if root_positions is not None and root_positions[i] >= ends[row] - 1:
                    with torch.inference_mode():
                        output.logits[i] = torch.nan
                    spoilt.append(row)
            return output

        with monkeypatch.context() as patch:
            patch.setattr(SlotTarget, "forward", spoiling)
            return original(self, tree, root_positions, match_lengths)

    monkeypatch.setattr(DecodingLoop, "_computed", computed)
    ours = generate(AHEAD[name](), "five-ragged", "greedy", graphs=True, **kwargs)
    assert torch.equal(ours.sequences, expected)
    assert spoilt


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
@every_drafter
def test_controller_decides_for_rounds_ahead(name, decoding, events):
    for _ in range(3):  # the first call measures
        events.clear()
        output = generate(AHEAD[name](), "five-ragged", decoding, graphs=True)
        assert torch.equal(output.sequences, plain_text("five-ragged", decoding))
    assert started_ahead(events)
    stats = output.speculation_stats
    if name != "none":
        assert sum(stats.shapes.values()) == len([kind for kind, _ in events if kind == "read"])
    assert stats.emitted_tokens == 5 * (NEW_TOKENS - 1)


@pytest.mark.parametrize("ends", [False, True], ids=["together", "one after another"])
@every_drafter
def test_void_round_is_repeated_without_drafts(name, ends, events, monkeypatch):
    """Drafts spoil every fourth pass with drafts; a round that was started after it is void or correct."""
    kwargs = late_ends("five-ragged", "greedy") if ends else {}
    expected = generate(None, "five-ragged", "greedy", **kwargs).sequences
    original, passes = PassRunner.score, []

    def score(self, tree, rows):
        output = original(self, tree, rows)
        if tree.num_nodes > 1:
            passes.append(tree)
            if len(passes) % 4 in (0, 1):
                with torch.inference_mode():
                    output.logits[1:] = torch.nan
        return output

    monkeypatch.setattr(PassRunner, "score", score)
    kwargs |= dict(graphs=True, speculation="fixed")
    output = generate(AHEAD[name](), "five-ragged", "greedy", **kwargs)
    assert torch.equal(output.sequences, expected)
    assert (output.speculation_stats.reruns > 1) == (name != "none")


@every_drafter
def test_learnt_positions_are_not_exceeded(name, events):
    """The model has no position after its last one, and an embedding out of range is an error."""
    torch.manual_seed(0)
    limit = 40
    config = GPT2Config(
        vocab_size=96,
        n_positions=limit,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=95,
    )
    model = GPT2LMHeadModel(config).eval()
    ids, _ = prompts(BATCHES["one"])
    kwargs = dict(max_length=limit, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    drafter = (
        NgramDrafter(min_ngram=1)
        if "head" in name or name in ("p-eagle", "combined")
        else AHEAD[name]()
    )
    ours = specdec_ext.generate(
        model, ids, drafter=drafter, graphs=True, speculation="fixed", **kwargs
    )
    assert torch.equal(ours, expected)
    assert any(kind == "read" for kind, _ in events)


class Collecting:
    """A streamer that fails after some tokens."""

    def __init__(self, fail_after=None):
        self.tokens, self._left = [], fail_after

    def put(self, value):
        self.tokens += value.flatten().tolist()
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt

    def end(self):
        pass


@every_drafter
def test_streamer_gets_the_text_and_may_interrupt(name, events):
    kwargs = dict(graphs=True, speculation="fixed")
    expected = plain_text("one", "greedy")
    streamer = Collecting()
    generate(AHEAD[name](), "one", "greedy", streamer=streamer, **kwargs)
    assert streamer.tokens == expected[0].tolist()
    for after in (1, 2, 5):
        with pytest.raises(KeyboardInterrupt):
            generate(AHEAD[name](), "one", "greedy", streamer=Collecting(after), **kwargs)
        again = generate(AHEAD[name](), "one", "greedy", **kwargs)
        assert torch.equal(again.sequences, expected)
