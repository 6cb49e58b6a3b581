"""An engine starts rounds before the host has read the last one; texts are those of each request alone."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.checks.engine_texts import SAMPLING, alone
from helpers.drafters.every_drafter import AHEAD, DRAFTERS
from helpers.models.tiny import VOCAB, tiny_model
from helpers.planned_engine import PlannedEngine
from helpers.texts.stopping_cases import letters_tokenizer, text_of
from transformers import StoppingCriteria

import specdec_ext
from specdec_ext import SpeculationStats
from specdec_ext.decoding.loop import DecodingLoop
from specdec_ext.engine import Engine, engine
from specdec_ext.engine.batch import RequestBatch
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.models.factory import make_target
from specdec_ext.models.graphs.arena import Arena
from specdec_ext.models.slots import SlotTarget
from specdec_ext.models.slots.round_state import RoundState
from specdec_ext.models.slots.runner import PassRunner

pytestmark = pytest.mark.usefixtures("fresh_arena", "by_modules")
every_drafter = pytest.mark.parametrize("name", AHEAD)
# Drafters that wait for the host.
IN_TURN = [
    name
    for name, make in DRAFTERS.items()
    if name not in AHEAD and (drafter := make()) is not None and drafter.joinable
]
PROMPT = [4, 5, 6] * 5


@pytest.fixture
def rounds(monkeypatch):
    """For each round that was read: whether the next one had been started, and who was running."""
    log, original = [], RequestBatch.verify

    def verify(self, tree, output, target, committed=None, is_latest=True):
        log.append((not is_latest, [*self.requests.values()]))
        return original(self, tree, output, target, committed, is_latest)

    monkeypatch.setattr(RequestBatch, "verify", verify)
    return log


@pytest.fixture
def checked(monkeypatch):
    """Before each round in turn, the state on the device is what the host knows about the rows."""
    original, checks = DecodingLoop._propose, []

    def propose(self):
        if self._commits_on_device:
            rows, batch = self.context.rows, self.batch
            numbers = self.target._state.of_rows(len(rows))
            calls = [batch.requests[place].call for place in rows]
            assert numbers.limits.tolist() == [call.stop.max_length for call in calls]
            assert numbers.root_positions.tolist() == self.context.root_positions
            assert numbers.root_parents.tolist() == [-1] * len(rows)
            assert numbers.ends.tolist() == self.target._rows.ends
            assert numbers.block_starts.tolist() == [self.target.start] * len(rows)
            for i, place in enumerate(rows):
                text = batch.requests[place].call.context.text(0)
                assert self.target._state.text[i, : len(text)].tolist() == text
                assert numbers.text_lengths[i] == len(text) and numbers.roots[i] == text[-1]
            assert self.context.roots.tolist() == numbers.roots.tolist()
            checks.append(len(rows))
        return original(self)

    monkeypatch.setattr(DecodingLoop, "_propose", propose)
    return checks


def run(name, plan, model=None, **options):
    """Run a plan, which is a function of the engine."""
    options = {"max_rows": 4, "speculation": "fixed", "graphs": True, **options}
    decoder = PlannedEngine(
        model or tiny_model("llama"),
        drafter={**DRAFTERS, **AHEAD}[name](),
        tokenizer=letters_tokenizer(),
        **options,
    )
    decoder.run(plan(decoder))
    return decoder


def random_requests(count, seed=0):
    """``(ids, arguments, when it is cancelled)`` that ops decide: ends of every kind, at different rounds."""
    rng, requests = random.Random(seed), []
    model = tiny_model("llama")
    for number in range(count):
        ids = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 30))]
        if number % 3 == 0:
            ids = (ids * 3)[:30]
        arguments = dict(max_new_tokens=rng.choice([1, 2, 9, 20, 33]), **rng.choice(SAMPLING))
        if arguments.get("do_sample"):
            arguments["seed"] = number
        arguments["eos_token_id"] = rng.choice([[3, 4], [3], [4, 7, 9], None])
        if number % 4 == 1 and arguments["max_new_tokens"] > 9:
            text = alone(model, ids, None, **arguments)
            arguments["stop_strings"] = text_of(text[len(text) // 2 :])[1:3]
        requests.append((ids, arguments, rng.randrange(1, 12) if number % 5 == 2 else None))
    return requests


def check_requests(name, requests, model=None, seed=0, **options):
    """Requests come and are cancelled at random rounds."""
    rng, handles = random.Random(seed), []

    def plan(decoder):
        left = [*requests]
        while left or any(handle.finish_reason is None for handle in handles):
            while left and rng.random() < 0.4:
                ids, arguments, _ = left.pop(0)
                handles.append(decoder.submit(ids, **arguments))
            for handle, (*_, when) in zip(handles, requests, strict=False):
                if when is not None and len(handle.tokens) >= when:
                    handle.cancel()
            yield

    decoder = run(name, plan, model, **options)
    for handle, (ids, arguments, _) in zip(handles, requests, strict=True):
        if "stop_strings" in arguments:
            arguments = arguments | dict(tokenizer=letters_tokenizer())
        expected = alone(model or tiny_model("llama"), ids, None, **arguments)
        if handle.finish_reason == "cancelled":
            assert handle.tokens == expected[: len(handle.tokens)]
        else:
            assert handle.tokens == expected, arguments
    emitted = sum(len(handle.tokens) for handle in handles) - len(handles)
    # The first token of a row comes from its prompt, also that of a row that is cancelled then.
    assert decoder.stats().emitted_tokens == emitted
    return handles


@every_drafter
def test_texts_of_requests_that_come_and_go(name, rounds, checked):
    handles = check_requests(name, random_requests(28))
    reasons = [handle.finish_reason for handle in handles]
    assert {"length", "stop", "cancelled"} == set(reasons)
    ahead = [len(running) for is_ahead, running in rounds if is_ahead]
    assert len(ahead) > len(rounds) / 3 and max(ahead) == 4
    assert len(checked) > 15


@pytest.mark.parametrize("name", IN_TURN)
def test_texts_with_drafters_that_wait_for_the_host(name, rounds, checked):
    """Their rounds are committed on the device, but none is started ahead."""
    check_requests(name, random_requests(12))
    assert len(checked) > 15 and not any(is_ahead for is_ahead, _ in rounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", "ngram", "combined"])
def test_texts_with_the_controller(name, dtype, rounds, checked, monkeypatch):
    if dtype == torch.float32:
        monkeypatch.setattr(engine, "PREFILL_TOKENS", 4)  # other rounds run between two parts
    model = tiny_model("llama", dtype=dtype)
    specdec_ext.free_graphs(model)
    check_requests(name, random_requests(24, seed=1), model, seed=1, speculation="auto")
    assert sum(is_ahead for is_ahead, _ in rounds) > 10


def test_engine_with_a_thread_of_its_own(rounds):
    with Engine(
        tiny_model("llama"), drafter=AHEAD["head"](), max_rows=3, speculation="fixed", graphs=True
    ) as decoder:
        requests = [(ids, dict(max_new_tokens=20)) for ids, *_ in random_requests(9, seed=2)]
        handles = [decoder.submit(ids, **arguments) for ids, arguments in requests]
        texts = [handle.result(60) for handle in handles]
    for (ids, arguments), text in zip(requests, texts, strict=True):
        assert text == alone(tiny_model("llama"), ids, None, **arguments)
    assert sum(is_ahead for is_ahead, _ in rounds) > len(rounds) / 3


@every_drafter
def test_round_ahead_is_read_before_a_row_joins(name, rounds, monkeypatch):
    """Rounds before and after are ahead, and nothing of the round that was read is lost."""
    joins, original = [], EngineLoop.join

    def join(self, request, output):
        assert self._ahead is None
        joins.append(len(rounds))
        original(self, request, output)

    monkeypatch.setattr(EngineLoop, "join", join)
    handles = []

    def plan(decoder):
        handles.append(decoder.submit(PROMPT, max_new_tokens=60))
        while decoder.loop._ahead is None:
            yield
        handles.append(decoder.submit([7, 8, 9], max_new_tokens=60))
        yield

    run(name, plan)
    for handle, ids in zip(handles, (PROMPT, [7, 8, 9]), strict=True):
        assert handle.tokens == alone(tiny_model("llama"), ids, None, max_new_tokens=60)
    last = joins[1] - 1
    assert [is_ahead for is_ahead, _ in rounds[last - 1 : last + 1]] == [True, False]
    assert any(is_ahead and len(running) == 2 for is_ahead, running in rounds[last:])


@every_drafter
def test_row_that_leaves_keeps_nothing_of_the_round_ahead(name):
    """It is cancelled while a round is ahead, in which the device emits tokens for it; others go on."""
    handles, at_cancel = [], []

    def plan(decoder):
        handles.extend(decoder.submit(ids, max_new_tokens=50) for ids in (PROMPT, [7, 8, 9]))
        while decoder.loop._ahead is None or len(handles[0].tokens) < 4:
            yield
        handles[0].cancel()
        at_cancel.extend(handles[0].tokens)
        yield
        assert decoder.loop._ahead is None and len(decoder.loop.context.rows) == 2
        yield
        assert len(decoder.loop.context.rows) == 1

    decoder = run(name, plan)
    assert handles[0].finish_reason == "cancelled" and handles[0].tokens == at_cancel
    assert handles[1].tokens == alone(tiny_model("llama"), [7, 8, 9], None, max_new_tokens=50)
    stats = [handle.stats for handle in handles]
    assert decoder.stats().emitted_tokens == sum(each.emitted_tokens for each in stats)
    assert [each.emitted_tokens + 1 for each in stats] == [len(handle.tokens) for handle in handles]


@every_drafter
def test_round_ahead_of_rows_that_have_all_left_is_dropped(name):
    """The next request takes a row of the same place, whose last token is the one of an older round."""
    handles = []
    expected = alone(tiny_model("llama"), PROMPT, None, max_new_tokens=30)

    def plan(decoder):
        handles.append(decoder.submit(PROMPT, max_new_tokens=60))
        while decoder.loop._ahead is None or len(handles[0].tokens) < 4:
            yield
        loop = decoder.loop
        handles[0].cancel()
        yield
        for _ in range(3):
            handles.append(decoder.submit(PROMPT, max_new_tokens=30))
            while handles[-1].finish_reason is None:
                yield
        assert decoder.loop is loop  # nothing has failed

    run(name, plan, max_rows=1)
    assert [handle.tokens for handle in handles[1:]] == [expected] * 3


@pytest.mark.parametrize(
    "arguments", [dict(repetition_penalty=1.3), dict(typical_p=0.9, do_sample=True, seed=1)]
)
@pytest.mark.parametrize("name", ["none", "ngram", "head"])
def test_rounds_run_in_turn_while_the_host_decides_for_a_row(name, arguments, rounds, checked):
    handles, texts = [], [PROMPT, [7, 8, 9], [9, 4, 4, 5]]
    each = [dict(max_new_tokens=70), dict(max_new_tokens=12, **arguments), dict(max_new_tokens=40)]

    def plan(decoder):
        handles.append(decoder.submit(texts[0], **each[0]))
        while decoder.loop._ahead is None:
            yield
        handles.append(decoder.submit(texts[1], **each[1]))
        yield
        handles.append(decoder.submit(texts[2], **each[2]))
        while handles[1].finish_reason is None:
            yield
        assert None in (handles[0].finish_reason, handles[2].finish_reason)

    run(name, plan)
    for handle, ids, given in zip(handles, texts, each, strict=True):
        assert handle.tokens == alone(tiny_model("llama"), ids, None, **given)
    with_it = [
        is_ahead for is_ahead, running in rounds if any(r.handle is handles[1] for r in running)
    ]
    assert with_it and not any(with_it)
    assert rounds[0][0] or rounds[1][0] or rounds[2][0]
    assert rounds[-2][0] or rounds[-3][0]  # again, when it has left


def test_requests_without_drafts_have_none(rounds):
    handles = []

    def plan(decoder):
        handles.append(decoder.submit(PROMPT, max_new_tokens=40))
        handles.append(decoder.submit(PROMPT, max_new_tokens=9, drafter=None))
        yield

    run("ngram", plan)
    expected = alone(tiny_model("llama"), PROMPT, None, max_new_tokens=40)
    assert handles[0].tokens == expected and handles[1].tokens == expected[:9]
    assert handles[1].stats.drafts == 0 < handles[0].stats.drafts
    assert rounds[-2][0]


class Fails(StoppingCriteria):
    """Fails at its sixth call; it sees each position once."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        if len(self.lengths) == 6:
            raise RuntimeError("a criterion failed")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@every_drafter
def test_an_error_of_one_request_disturbs_no_other(name, rounds):
    handles, criterion = [], Fails()

    def plan(decoder):
        handles.append(decoder.submit(PROMPT, max_new_tokens=40, stopping_criteria=[criterion]))
        handles.extend(decoder.submit(ids, max_new_tokens=40) for ids in ([7, 8, 9], [9, 4, 4, 5]))
        yield

    run(name, plan)
    with pytest.raises(RuntimeError, match="a criterion failed"):
        handles[0].result(1)
    assert criterion.lengths == [len(PROMPT) + count for count in range(1, 7)]
    for handle, ids in zip(handles[1:], ([7, 8, 9], [9, 4, 4, 5]), strict=True):
        assert handle.tokens == alone(tiny_model("llama"), ids, None, max_new_tokens=40)
    assert any(is_ahead for is_ahead, _ in rounds)


@every_drafter
def test_a_row_that_cant_join_ends_the_batch_and_the_engine_goes_on(name, monkeypatch):
    handles = []

    def plan(decoder):
        handles.append(decoder.submit(PROMPT, max_new_tokens=60))
        while decoder.loop._ahead is None:
            yield
        with monkeypatch.context() as patched:
            patched.setattr(SlotTarget, "adopt", lambda *_, **__: 1 / 0)
            handles.append(decoder.submit([7, 8, 9], max_new_tokens=20))
            yield
        handles.append(decoder.submit([7, 8, 9], max_new_tokens=20))
        while decoder.loop._ahead is None:
            yield

    run(name, plan)
    for handle in handles[:2]:
        with pytest.raises(ZeroDivisionError):
            handle.result(1)
    assert handles[2].tokens == alone(tiny_model("llama"), [7, 8, 9], None, max_new_tokens=20)


def test_a_round_ahead_that_fails_to_be_read_ends_the_batch_and_the_newcomer_goes_on(monkeypatch):
    handles = []

    def plan(decoder):
        handles.append(decoder.submit(PROMPT, max_new_tokens=60))
        while decoder.loop._ahead is None:
            yield
        decoder.loop._ahead.committed.tree = None  # nothing can be read
        handles.append(decoder.submit([7, 8, 9], max_new_tokens=20))
        yield

    run("ngram", plan)
    with pytest.raises(AttributeError):
        handles[0].result(1)
    assert handles[1].tokens == alone(tiny_model("llama"), [7, 8, 9], None, max_new_tokens=20)


@every_drafter
def test_drafts_that_spoil_a_row_void_the_round(name, rounds, monkeypatch):
    """In every fourth pass with drafts, those of one row do; all rows repeat it."""
    original, passes = PassRunner.score, []

    def score(self, tree, rows):
        output = original(self, tree, rows)
        if tree.num_nodes > 1 and tree.num_rows > 1:
            passes.append(tree)
            if len(passes) % 4 in (0, 1):
                with torch.inference_mode():
                    output.logits[1] = torch.nan
        return output

    monkeypatch.setattr(PassRunner, "score", score)
    requests = [(ids, dict(max_new_tokens=30), None) for ids in (PROMPT, [7, 8, 9], [9, 4, 4, 5])]
    handles = check_requests(name, requests)
    assert any(handle.stats.reruns for handle in handles) == (name != "none")


@every_drafter
def test_row_with_invalid_logits_ends_alone(name, rounds, monkeypatch):
    """The model itself gives NaN for it from some position on, in rounds ahead as well."""
    original, handles = PassRunner.score, []

    def score(self, tree, rows):
        output = original(self, tree, rows)
        if tree.num_rows == 3 and len(handles[1].tokens) > 8:
            with torch.inference_mode():
                output.logits[1] = torch.nan
        return output

    monkeypatch.setattr(PassRunner, "score", score)
    texts = (PROMPT, [7, 8, 9], [9, 4, 4, 5])

    def plan(decoder):
        handles.extend(decoder.submit(ids, max_new_tokens=60) for ids in texts)
        yield

    run(name, plan)
    with pytest.raises(ValueError, match="contain NaN"):
        handles[1].result(1)
    for i in (0, 2):
        assert handles[i].tokens == alone(tiny_model("llama"), texts[i], None, max_new_tokens=60)


@pytest.mark.parametrize("name", ["none", "ngram", "head"])
def test_rows_that_come_and_go_record_nothing_anew(name, monkeypatch):
    """After each number of rows was seen, joins and ends make no recording, and no tensor of the state."""
    made, original = [], Arena.new_pass
    monkeypatch.setattr(Arena, "new_pass", lambda *args: made.append(args[1:]) or original(*args))
    states, empty = [], RoundState.empty
    monkeypatch.setattr(
        RoundState, "empty", lambda *args: states.append(empty(*args)) or states[-1]
    )
    counts, addresses = [], []

    def plan(decoder):
        for wave in range(3):
            handles = []
            for ids, arguments, _ in random_requests(10, seed=3):
                arguments = arguments | dict(eos_token_id=[3, 4 + wave])
                handles.append(decoder.submit(ids, **arguments))
                yield
            while any(handle.finish_reason is None for handle in handles):
                yield
            counts.append(len(made))
            state = decoder.loop.target._state or decoder.loop.target._idle_state
            addresses.append([state.numbers.data_ptr(), state.text.data_ptr()])

    run(name, plan)
    assert counts[0] > 2 and counts[1:] == [counts[0]] * 2
    assert len(made) == len(set(made)) and len(states) == 1
    assert addresses == [addresses[0]] * 3


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_are_those_of_rounds_in_turn(top, rounds):
    found = {}
    for graphs in (True, False):
        handles = []

        def plan(decoder, handles=handles):
            for seed in range(3):
                arguments = dict(max_new_tokens=15, do_sample=True, seed=seed, logprobs=top)
                handles.append(decoder.submit([*PROMPT, seed], **arguments))
            yield

        run("ngram", plan, graphs=graphs)
        bursts = [handle.take()[0] for handle in handles]
        found[graphs] = [[each for burst in one for each in burst.logprobs] for one in bursts]
        if graphs:
            assert any(is_ahead for is_ahead, _ in rounds)
    assert found[True] == found[False]
    assert all(len(each) == 15 for each in found[True])


def test_shutdown_while_a_round_is_ahead_frees_the_model():
    model = tiny_model("llama")
    decoder = Engine(model, drafter=AHEAD["ngram"](), speculation="fixed", graphs=True)
    handles = [decoder.submit(PROMPT, max_new_tokens=100) for _ in range(3)]
    next(iter(handles[0]))
    decoder.shutdown(drain=False)
    expected = alone(model, PROMPT, None, max_new_tokens=100)
    for handle in handles:
        assert handle.finish_reason == "cancelled"
        assert handle.tokens == expected[: len(handle.tokens)]
    given = dict(graphs=True, speculation="fixed", max_new_tokens=100)
    assert alone(model, PROMPT, DRAFTERS["ngram"](), **given) == expected


def test_what_the_device_has_of_earlier_rows_is_not_that_of_a_row_that_joins():
    """Their last tokens and positions are equal, but later rounds have changed them on the device."""
    model = tiny_model("llama")
    batch = RequestBatch(make_target(model, 64), 1, 50, SpeculationStats())
    request = Engine(model, drafter=None)._prepared(PROMPT, 1, None, dict(max_new_tokens=9))
    request.call.context.emit([0], [7])
    batch.join(request, 0)
    context, (tokens, positions) = batch.context, torch.tensor([[7], [len(PROMPT)]])
    context.stage(tokens)
    batch._root_positions.of(context.root_positions, positions)
    tokens += 1
    positions += 1
    context.rows = []
    batch.join(request, 0)
    assert context.roots.tolist() == [7]
    assert batch._root_positions.of(context.root_positions).tensor.tolist() == [len(PROMPT)]
