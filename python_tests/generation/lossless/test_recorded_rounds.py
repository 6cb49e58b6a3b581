"""Rounds that are one recording: text, statistics and cache are those of a loop without recordings.

The recordings are replayed call by call (``helpers/replays.py``), so Python takes no part in these rounds.
"""

from __future__ import annotations

from copy import copy

import pytest
import torch
from helpers.checks.engine_texts import alone
from helpers.checks.lossless import NEW_TOKENS, counters, generate, late_ends, plain_text
from helpers.drafters.every_drafter import AHEAD, DRAFTERS
from helpers.drafters.head_cases import head_of
from helpers.models.tiny import BATCHES, ScriptedDrafter, oracle_chain, prompts, tiny_model
from helpers.planned_engine import PlannedEngine
from helpers.replays import ReplayGraph

import specdec_ext
from specdec_ext import Drafter, HeadDrafter, NgramDrafter, generation
from specdec_ext.drafters.heads import head_cache
from specdec_ext.models.graphs import arena as arena_module
from specdec_ext.models.graphs import runner
from specdec_ext.models.graphs.arena import lender_of
from specdec_ext.models.graphs.graph import NotRecordableError
from specdec_ext.models.graphs.recorded import RecordedRound
from specdec_ext.models.slots import target as target_module
from specdec_ext.schedule.policy import Policy

every_drafter = pytest.mark.parametrize("name", AHEAD)
every_batch = pytest.mark.parametrize("batch", BATCHES)
FIXED = dict(speculation="fixed", graphs=True)


@pytest.fixture(autouse=True)
def replayed(monkeypatch):
    specdec_ext.free_graphs(tiny_model("llama"))
    monkeypatch.setattr(arena_module, "HostGraph", ReplayGraph)
    monkeypatch.setattr(ReplayGraph, "replays", 0)
    # The direct pass of the call without recordings rounds in another order than the modules.
    monkeypatch.setattr(target_module, "usable", lambda model, direct: None)


@pytest.fixture
def made(monkeypatch):
    """The keys of all recordings of rounds, in the order in which they were made."""
    keys, original = [], RecordedRound.record

    def record(self, compute):
        original(self, compute)
        keys.append(self)

    monkeypatch.setattr(RecordedRound, "record", record)
    return keys


def check_same(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    assert counters(ours) == counters(theirs)
    layers = zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True)
    for mine, other in layers:
        torch.testing.assert_close(mine.keys, other.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(mine.values, other.values, rtol=0, atol=1e-5)


def check_call(make, batch, decoding, used=None, **kwargs):
    """A call with recorded rounds is that without recordings, for the drafter ``used`` if it is given."""
    theirs = generate(make(), batch, decoding, speculation="fixed", **kwargs)
    check_same(generate(used or make(), batch, decoding, **FIXED, **kwargs), theirs)


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
@every_batch
@every_drafter
def test_calls_are_those_without_recordings(name, batch, decoding, made):
    """The calls have other ends, seeds and lengths, and the recordings of those before."""
    sampled = dict(seed=11, temperature=1.3) if decoding == "sampled" else {}
    drafter = AHEAD[name]()
    check_call(AHEAD[name], batch, decoding, drafter)
    assert ReplayGraph.replays > NEW_TOKENS / 3
    for kwargs in (
        late_ends(batch, decoding),
        dict(max_new_tokens=NEW_TOKENS + 9, **sampled),
        {},
    ):
        check_call(AHEAD[name], batch, decoding, drafter, **kwargs)
    made.clear()
    check_call(AHEAD[name], batch, decoding, drafter)
    assert not made


def test_calls_with_copies_of_a_head_share_a_recording(made):
    """A drafter that is chosen by name is copied for each call; the head is bound once."""
    original = HeadDrafter(head_of("eagle3"))
    original.feature_layers(tiny_model("llama"))
    for calls in range(3):
        check_call(lambda: copy(original), "one", "greedy")
        assert len(made) == 1, calls


def test_two_drafters_that_live_do_not_share_a_cache(made):
    one = HeadDrafter(head_of("eagle3"))
    check_call(lambda: one, "one", "greedy")
    other = copy(one)
    check_call(lambda: other, "one", "greedy")
    assert one._cache is not other._cache


@pytest.mark.parametrize("name", ["head", "combined"])
def test_head_cache_that_grows_is_recorded_anew(name, made, monkeypatch):
    monkeypatch.setattr(head_cache, "STEP", 12)
    drafter = AHEAD[name]()
    check_call(lambda: drafter, "one", "greedy", max_new_tokens=60)
    assert len(made) > 2


def test_recordings_depend_on_the_rule_of_the_drafter(made):
    """All of these trees have the same shape."""
    for options in ({}, dict(min_ngram=3), dict(max_ngram=2), dict(num_branches=2)):
        make = lambda options=options: NgramDrafter(**{"min_ngram": 1, **options})  # noqa: E731
        check_call(make, "one", "greedy")
    assert len(made) == 4


def test_recordings_depend_on_what_verifies(made):
    """Greedy texts have no filters, and sampled ones other filters in every call."""
    for kwargs in ({}, dict(top_p=0.4), dict(min_p=0.3, top_k=0), dict(temperature=1.0, top_k=0)):
        check_call(DRAFTERS["ngram"], "one", "sampled", **kwargs)
    check_call(DRAFTERS["ngram"], "one", "greedy")
    assert len(made) == 2


def test_end_of_sequence_ids_of_an_earlier_call_are_forgotten():
    text = plain_text("one", "greedy")[0, -NEW_TOKENS:].tolist()
    for count in (1, 12, 2):
        ids = [*text[20:21], *range(1000, 1000 + count - 1)]
        check_call(DRAFTERS["ngram"], "one", "greedy", eos_token_id=ids, pad_token_id=0)
    check_call(DRAFTERS["ngram"], "one", "greedy")


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
@pytest.mark.parametrize("name", ["none", "ngram", "head"])
def test_logits_outlive_the_next_replay(name, decoding):
    ours, theirs = (
        generate(AHEAD[name](), "one", decoding, graphs=graphs, output_logits=True)
        for graphs in (True, False)
    )
    for mine, other in zip(ours.logits, theirs.logits, strict=True):
        assert torch.equal(mine, other)


class Watching(Drafter):
    """Drafts nothing, but reads the outputs of all rounds."""

    def __init__(self):
        self.seen = []

    def feature_layers(self, model):
        return (1,)

    def propose(self, context):
        raise AssertionError("there is no draft")

    def commit(self, context, accepted, output):
        nodes = accepted.path.gather(1, accepted.num_accepted[:, None])
        self.seen.append((output.logits.clone(), output.features.clone(), nodes.tolist()))


class PlainRounds(Policy):
    """Never drafts."""

    def choose(self, context):
        return False

    @property
    def decided(self):
        return False


def test_outputs_of_plain_rounds_outlive_the_next_replay(monkeypatch):
    """A drafter that may draft later keeps them."""
    original = generation.CallLoop

    def loop(target, drafter, call, policy):
        return original(target, drafter, call, PlainRounds(drafter))

    monkeypatch.setattr(generation, "CallLoop", loop)
    seen = []
    for graphs in (True, False):
        drafter = Watching()
        generate(drafter, "one", "greedy", graphs=graphs, speculation="fixed")
        seen.append(drafter.seen)
    assert ReplayGraph.replays > NEW_TOKENS / 3
    for ours, theirs in zip(*seen, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        assert ours[2] == theirs[2]


@every_drafter
def test_controller_has_recorded_rounds(name):
    drafter = AHEAD[name]()
    for _ in range(3):  # the first call measures
        output = generate(drafter, "five-ragged", "greedy", graphs=True)
        assert torch.equal(output.sequences, plain_text("five-ragged", "greedy"))
    assert ReplayGraph.replays


SAMPLED = dict(do_sample=True, temperature=0.9)


@every_drafter
def test_requests_of_an_engine_come_and_go(name, made):
    """Rows change places, and each has its own seed, filters and limit."""
    model = tiny_model("llama")
    requests = [
        ([4, 5, 6] * 5, dict(max_new_tokens=50)),
        ([7, 8, 9], dict(max_new_tokens=21, seed=1, top_k=9, **SAMPLED)),
        ([9, 4, 4, 5], dict(max_new_tokens=33, seed=2, top_p=0.8, **SAMPLED)),
        ([1, 2] * 4, dict(max_new_tokens=40, seed=2, **SAMPLED)),
        ([3], dict(max_new_tokens=26)),
        ([4, 5, 6] * 5, dict(max_new_tokens=30, seed=5, top_k=3, **SAMPLED)),
    ]
    decoder = PlannedEngine(model, drafter=AHEAD[name](), max_rows=3, **FIXED)
    handles = []

    def plan():
        for ids, arguments in requests:
            handles.append(decoder.submit(ids, **arguments))
            for _ in range(5):
                yield

    decoder.run(plan())
    assert ReplayGraph.replays > 20
    for handle, (ids, arguments) in zip(handles, requests, strict=True):
        assert handle.tokens == alone(model, ids, None, **arguments)


def test_round_is_recorded_when_it_is_needed_for_the_third_time(monkeypatch, made):
    expected = plain_text("one", "greedy")  # records nothing yet
    monkeypatch.setattr(target_module, "RECORDING_DEVICES", ("cpu",))
    output = generate(None, "one", "greedy", speculation="fixed", graphs="auto")
    assert torch.equal(output.sequences, expected)
    arena = lender_of(tiny_model("llama")).arena
    rounds_without = 2 * runner.RECORDED_AT  # of the pass, then of the round
    assert len(made) == 1 and len(arena.rounds) == 1
    # The pass was replayed for its comparison, and in the rounds that were not recorded.
    assert ReplayGraph.replays == NEW_TOKENS - 1 - rounds_without + runner.RECORDED_AT


class Scripted(ScriptedDrafter):
    def __init__(self, answers):
        super().__init__(answers, oracle_chain)


REASONS = {
    "processor": (
        DRAFTERS["ngram"],
        dict(typical_p=0.9),
        "other logits processors than temperature, top-k, top-p and min-p take part",
    ),
    "drafter": (
        lambda: Scripted(plain_text("one", "sampled")[:, -NEW_TOKENS:].tolist()),
        {},
        "Scripted needs the last round on the host",
    ),
    "module": (DRAFTERS["medusa"], {}, "MedusaDrafter needs the last round on the host"),
    "host": (DRAFTERS["ngram"], dict(repetition_penalty=1.2), "the host decides"),
}


@pytest.mark.parametrize("case", REASONS)
def test_reason_is_told_where_only_the_pass_is_recorded(case, caplog, made):
    make, kwargs, reason = REASONS[case]
    theirs = generate(make(), "one", "sampled", speculation="fixed", **kwargs)
    with caplog.at_level("INFO", logger="specdec_ext"):
        check_same(generate(make(), "one", "sampled", **FIXED, **kwargs), theirs)
    start = "passes of LlamaForCausalLM are recorded, whole rounds are not: "
    assert [text for text in caplog.messages if text.startswith(start + reason)]
    assert not made and lender_of(tiny_model("llama")).arena.passes


@pytest.mark.parametrize("step", ["run", "record"])
@pytest.mark.parametrize("name", ["ngram", "head", "combined"])
def test_round_that_can_not_be_recorded_is_done_once(name, step, monkeypatch, caplog):
    """The work before the commit is repeated, or the recording is dropped after it."""
    original = RecordedRound.run

    def refuse(self, compute):
        if step == "run":
            with monkeypatch.context() as patch:
                patch.setattr(target_module.SlotTarget, "commit_round", fail)
                original(self, compute)
        fail()

    def fail(*_):
        raise NotRecordableError("it waits")

    monkeypatch.setattr(RecordedRound, step, refuse)
    with caplog.at_level("INFO", logger="specdec_ext"):
        check_call(AHEAD[name], "five-ragged", "sampled")
    assert caplog.messages == [
        "passes of LlamaForCausalLM are recorded, whole rounds are not: it waits"
    ]
    assert not lender_of(tiny_model("llama")).arena.rounds


def test_call_after_an_interrupt_begins_the_state_anew():
    class Interrupts:
        def __init__(self):
            self._left = 9

        def put(self, value):
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt

        def end(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        generate(DRAFTERS["ngram"](), "one", "greedy", streamer=Interrupts(), **FIXED)
    check_call(DRAFTERS["ngram"], "one", "greedy")


def test_call_inside_of_a_call_has_a_state_of_its_own():
    class Nested:
        def put(self, value):
            check_call(DRAFTERS["ngram"], "five-ragged", "sampled")

        def end(self):
            pass

    ids, _ = prompts(BATCHES["one"])
    output = generate(
        DRAFTERS["ngram"](), "one", "greedy", streamer=Nested(), max_new_tokens=6, **FIXED
    )
    assert torch.equal(output.sequences, plain_text("one", "greedy")[:, : ids.shape[1] + 6])
