"""Rounds that are committed on the device: the state equals what the host knows, and the text is the same."""

from __future__ import annotations

import pytest
import torch
from helpers.checks.lossless import counters, generate, late_ends, plain_text
from helpers.drafters.every_drafter import DRAFTERS
from helpers.models.tiny import tiny_model
from helpers.texts.stopping_cases import endless
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import specdec_ext
from specdec_ext import Drafter, HeadDrafter, ops
from specdec_ext.drafters.combined import CombinedDrafter
from specdec_ext.models.cache.slot_cache import SlotCache
from specdec_ext.models.slots import round_state
from specdec_ext.models.slots.round_state import RoundState
from specdec_ext.models.slots.runner import PassRunner

pytestmark = pytest.mark.usefixtures("fresh_arena")


@pytest.fixture
def states(monkeypatch):
    """The states of all calls."""
    begun = []
    original = RoundState.empty
    monkeypatch.setattr(
        RoundState, "empty", lambda *args: begun.append(original(*args)) or begun[-1]
    )
    return begun


@pytest.fixture
def compacted(monkeypatch):
    """The calls that move keys and values without ``round_commit``."""
    calls = []
    original = SlotCache.compact
    monkeypatch.setattr(SlotCache, "compact", lambda *args: calls.append(args) or original(*args))
    return calls


@pytest.fixture
def checked_layout(monkeypatch):
    """Every pass is given the numbers that follow from the ends of its rows."""
    original, passes = PassRunner.score, []

    def score(self, tree, rows):
        lengths = [end - first for end, first in zip(rows.ends, rows.first_slots, strict=True)]
        assert rows.packed_numbers.tolist() == [
            [end - padding for end, padding in zip(rows.ends, rows.paddings, strict=True)],
            rows.ends,
            rows.first_slots,
            lengths,
            [max(rows.ends)] * len(rows.ends),
        ]
        passes.append(tree)
        return original(self, tree, rows)

    monkeypatch.setattr(PassRunner, "score", score)
    return passes


class Spy(Drafter):
    """Compares the state on the device with the text on the host before every proposal."""

    def __init__(self, drafter, states):
        self.drafter, self._states, self.proposals = drafter, states, 0

    def start(self, context, model, output):
        self.drafter.start(context, model, output)
        self._lengths = [1] * len(context.generated)

    def propose(self, context):
        (state,) = self._states
        numbers = state.of_rows(len(context.rows))
        text = context.sequences()
        lengths = [context.columns(row) for row in context.rows]
        for i, row in enumerate(context.rows):
            assert torch.equal(state.text[i, : lengths[i]], text[row, : lengths[i]])
        assert numbers.text_lengths.tolist() == lengths
        assert numbers.roots.tolist() == [context.generated[row][-1] for row in context.rows]
        assert numbers.root_positions.tolist() == context.root_positions
        assert set(numbers.root_parents.tolist()) == {-1}
        now = [len(tokens) for tokens in context.generated]
        if self.proposals:
            assert numbers.counts.tolist() == [
                now[row] - self._lengths[row] for row in context.rows
            ]
        self._lengths = now
        self.proposals += 1
        return self.drafter.propose(context)

    def commit(self, context, accepted, output):
        self.drafter.commit(context, accepted, output)


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
@pytest.mark.parametrize("batch", ["one", "five-ragged"])
def test_state_equals_what_the_host_knows(batch, decoding, states, compacted, checked_layout):
    """With ends of rows by an end-of-sequence id, at different rounds."""
    kwargs = late_ends(batch, decoding)
    expected = generate(None, batch, decoding, **kwargs).sequences
    compacted.clear()
    spy = Spy(DRAFTERS["ngram"](), states)
    ours = generate(spy, batch, decoding, graphs=True, speculation="fixed", **kwargs)
    assert torch.equal(ours.sequences, expected)
    assert spy.proposals > 3 and checked_layout
    # At the end of the call, the last tokens of rows that ended early are read without drafts.
    assert len(compacted) <= (batch != "one")


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
@pytest.mark.parametrize("batch", ["one", "five-ragged"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_and_statistics_are_those_of_the_host(name, batch, decoding, states):
    """Also where rows end inside a block, by an end-of-sequence id and at the maximum length."""
    for kwargs in ({}, late_ends(batch, decoding)):
        kwargs = {"speculation": "fixed", **kwargs}
        ours, theirs = (
            generate(DRAFTERS[name](), batch, decoding, graphs=graphs, **kwargs)
            for graphs in (True, False)
        )
        assert torch.equal(ours.sequences, theirs.sequences)
        assert counters(ours) == counters(theirs)
        assert states[0].rounds
    assert len(states) == 1  # the calls of a model share it


@pytest.mark.usefixtures("by_modules")
@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
@pytest.mark.parametrize("batch", ["one", "five-ragged"])
@pytest.mark.parametrize("name", ["head", "p-eagle"])
def test_head_reads_the_last_round_on_the_device(name, batch, decoding, states, monkeypatch):
    """Every draft is that of a head that is given the features by the host, also after rows have ended."""
    original, calls = HeadDrafter._run, []

    def run(self, tree, texts, features, *numbers):
        kept = [each.new_features for each in states if each.new_features is not None]
        on_device = any(features.data_ptr() == each.data_ptr() for each in kept)
        counts, _, positions, _ = numbers
        ends = (positions + counts).tolist()
        tokens, parents = original(self, tree, texts, features, *numbers)
        drafts = zip(ends, *(map(tuple, x.tolist()) for x in (tokens, parents)), strict=True)
        read = counts.tolist()
        calls.append((on_device, {(i, *x) for i, x in enumerate(drafts) if read[i]}))
        return tokens, parents

    monkeypatch.setattr(HeadDrafter, "_run", run)
    kwargs = {"speculation": "fixed", **late_ends(batch, decoding)}
    for graphs in (True, False):
        generate(DRAFTERS[name](), batch, decoding, graphs=graphs, **kwargs)
        if graphs:
            ours = set().union(*(drafts for _, drafts in calls))
            assert sum(on_device for on_device, _ in calls) > 3
            calls.clear()
    theirs = set().union(*(drafts for _, drafts in calls))
    # A round ahead may draft for rows that have just ended.
    assert theirs <= ours and not any(on_device for on_device, _ in calls)


def test_features_of_a_wide_tree_are_not_gathered(states, monkeypatch):
    monkeypatch.setattr(round_state, "FEATURE_NODES", 0)
    given = dict(speculation="fixed", max_new_tokens=12)
    ours, theirs = (
        generate(DRAFTERS["head"](), "one", "greedy", graphs=graphs, **given)
        for graphs in (True, False)
    )
    assert states[0].new_features is None and states[0].rounds
    assert counters(ours) == counters(theirs)


@pytest.mark.parametrize("rule", ["rejection", "block", "recursive"])
def test_other_rules_are_committed_on_the_device(rule, states, compacted):
    model = tiny_model("llama")
    ids, mask, _ = endless("five-ragged")
    kwargs = dict(
        attention_mask=mask,
        drafter=specdec_ext.DraftModelDrafter(tiny_model("llama"), sampled=True),
        verification=rule,
        do_sample=True,
        temperature=0.7,
        seed=5,
        max_new_tokens=20,
        speculation="fixed",
    )
    specdec_ext.free_graphs(model)
    texts = [specdec_ext.generate(model, ids, graphs=graphs, **kwargs) for graphs in (True, False)]
    assert torch.equal(*texts)
    assert states[0].rounds


class PreferEven(LogitsProcessor):
    """Reads the text, so the host walks."""

    def __call__(self, input_ids, scores):
        return scores + (input_ids[:, -1:] % 2 == torch.arange(scores.shape[-1]) % 2)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"logits_processor": LogitsProcessorList([PreferEven()])},
        {"repetition_penalty": 1.3},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, scores: ids[:, -1] == 7])},
        {"output_scores": True},
    ],
    ids=["own-processor", "penalty", "criterion", "scores"],
)
def test_host_decides_where_ops_can_not(kwargs, states):
    given = dict(max_new_tokens=20, speculation="fixed", **kwargs)
    ours, theirs = (
        generate(DRAFTERS["ngram"](), "five-ragged", "greedy", graphs=graphs, **given)
        for graphs in (True, False)
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    assert not states


def test_void_round_is_repeated_without_drafts(states, monkeypatch):
    """Drafts spoil the logits of every third pass; nothing of these rounds is committed."""
    expected = plain_text("five-ragged", "greedy")
    original, passes = PassRunner.score, []

    def score(self, tree, rows):
        output = original(self, tree, rows)
        passes.append(tree)
        if tree.num_nodes > 1 and len(passes) % 3 == 0:
            with torch.inference_mode():
                output.logits[1:] = torch.nan
        return output

    monkeypatch.setattr(PassRunner, "score", score)
    spy = Spy(DRAFTERS["ngram"](), states)
    output = generate(spy, "five-ragged", "greedy", graphs=True, speculation="fixed")
    assert torch.equal(output.sequences, expected)
    assert output.speculation_stats.reruns > 1
    assert states[0].rounds == len(passes)


def test_invalid_logits_are_an_error_that_names_the_position(monkeypatch):
    original, passes = PassRunner.score, []

    def score(self, tree, rows):
        output = original(self, tree, rows)
        passes.append(tree)
        if len(passes) == 4:
            with torch.inference_mode():
                output.logits[:] = torch.nan
        return output

    monkeypatch.setattr(PassRunner, "score", score)
    with pytest.raises(ValueError, match=r"logits of row 0 at position 1\d contain NaN"):
        generate(None, "one", "greedy", graphs=True)


def test_damaged_state_is_an_error(states):
    class Damaging(Spy):
        def propose(self, context):
            tree = super().propose(context)
            if self.proposals == 3:
                self._states[0].clock[0] += 1
            return tree

    spy = Damaging(DRAFTERS["ngram"](), states)
    with pytest.raises(RuntimeError, match="the state of round 3 on the device is damaged"):
        generate(spy, "one", "greedy", graphs=True, speculation="fixed")


def test_copies_and_drafts_of_two_drafters_share_a_state(states):
    head, ngram = DRAFTERS["head"](), DRAFTERS["ngram"]()
    given = dict(speculation="fixed", max_new_tokens=24)
    ours, theirs = (
        generate(CombinedDrafter(ngram, head), "five-ragged", "sampled", graphs=graphs, **given)
        for graphs in (True, False)
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    assert counters(ours) == counters(theirs)


def test_ring_keeps_the_latest_entry(states):
    generate(DRAFTERS["ngram"](), "one", "greedy", graphs=True, speculation="fixed")
    (state,) = states
    assert state.clock.tolist() == [state.rounds, 0]
    (entry,) = state.ring
    assert ops.RoundEntry.of(entry, 1, 1).round == state.rounds
