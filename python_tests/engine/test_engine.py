"""Requests of an engine: ends, limits, errors, cancellation, log probabilities, reading from tasks."""

import asyncio
import threading

import pytest
import torch
from helpers.checks.poison import poisoned, unread_tokens
from helpers.drafters.every_drafter import DRAFTERS
from helpers.models.tiny import prompts, random_model, tiny_model
from helpers.texts.tiny_text import tiny_tokenizer
from transformers import LogitsProcessor, StoppingCriteria

from specdec_ext import Drafter, DraftTree, SpeculationConfig, generate
from specdec_ext.engine import Engine, engine
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.engine.request import Request
from specdec_ext.errors import CantJoinError, EngineClosedError, EngineFullError
from specdec_ext.models.slots import SlotTarget

PROMPT = [5, 9, 2, 8]


@pytest.fixture
def model():
    return tiny_model("llama")


def text_of(model, ids=PROMPT, **arguments) -> list[int]:
    return generate(model, torch.tensor([ids]), drafter=None, **arguments)[0, len(ids) :].tolist()


def test_bursts_are_the_text(model):
    with Engine(model, drafter=DRAFTERS["ngram"](), speculation="fixed") as engine:
        handle = engine.submit([4, 5, 6] * 5, max_new_tokens=30)
        bursts = list(handle)
    tokens = [token for burst in bursts for token in burst.tokens]
    assert tokens == handle.tokens == text_of(model, [4, 5, 6] * 5, max_new_tokens=30)
    assert all(len(burst.drafted) == len(burst.tokens) for burst in bursts)
    drafted = sum(sum(burst.drafted) for burst in bursts)
    assert drafted == handle.stats.accepted_tokens
    times = handle.times
    assert times.submitted <= times.started <= times.first_token <= times.finished


def test_reasons_of_the_end(model):
    long = text_of(model, max_new_tokens=20)
    with Engine(model, drafter=None) as engine:
        length = engine.submit(PROMPT, max_new_tokens=20)
        ended = engine.submit(PROMPT, max_new_tokens=20, eos_token_id=long[7])
        first = engine.submit(PROMPT, max_new_tokens=1)
        assert length.result(60) == long
        assert ended.result(60) == long[: long.index(long[7]) + 1]
        assert first.result(60) == long[:1]
    reasons = [each.finish_reason for each in (length, ended, first)]
    assert reasons == ["length", "stop", "length"]


def test_criteria_of_a_request_read_its_text_alone(model):
    seen = []

    class AfterFive(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(tuple(input_ids.shape))
            return torch.full((len(input_ids),), input_ids.shape[1] >= len(PROMPT) + 5)

    with Engine(model, drafter=DRAFTERS["ngram"]()) as engine:
        others = [engine.submit([each] * 9, max_new_tokens=25) for each in range(3, 6)]
        handle = engine.submit(PROMPT, max_new_tokens=20, stopping_criteria=[AfterFive()])
        assert handle.result(60) == text_of(model, max_new_tokens=5)
        for other in others:
            assert len(other.result(60)) == 25
    assert handle.finish_reason == "stop"
    assert seen == [(1, len(PROMPT) + count) for count in range(1, 6)]


def test_cancelled_requests_leave(model):
    with Engine(model, drafter=None, max_rows=1) as engine:
        running = engine.submit(PROMPT, max_new_tokens=100)
        waiting = engine.submit([3, 4], max_new_tokens=100)
        next(iter(running))
        waiting.cancel()
        running.cancel()
        after = engine.submit([6, 7], max_new_tokens=5)
        assert after.result(60) == text_of(model, [6, 7], max_new_tokens=5)
        tokens = running.result(60)
        assert tokens == text_of(model, max_new_tokens=100)[: len(tokens)] and len(tokens) < 100
        assert waiting.result(60) == []
    assert running.finish_reason == waiting.finish_reason == "cancelled"


def test_an_error_of_one_request_disturbs_no_other(model):
    class Fails(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 9:
                raise RuntimeError("a processor failed")
            return scores

    with Engine(model, drafter=DRAFTERS["ngram"]()) as engine:
        others = [engine.submit([each] * 6, max_new_tokens=30) for each in range(3, 6)]
        failing = engine.submit(PROMPT, max_new_tokens=30, logits_processor=[Fails()])
        with pytest.raises(RuntimeError, match="a processor failed"):
            failing.result(60)
        with pytest.raises(RuntimeError, match="a processor failed"):
            list(failing)
        for each, other in zip(range(3, 6), others, strict=True):
            assert other.result(60) == text_of(model, [each] * 6, max_new_tokens=30)
    assert failing.finish_reason == "error" and len(failing.tokens) == 9 - len(PROMPT)


def test_a_step_reads_as_many_prompts_as_its_budget_allows(model, monkeypatch):
    """A running text waits for 8 tokens of prompts at most, and long parts are told to the policy."""
    read, step, prefill = [[]], EngineLoop.step, Request.prefill
    hurries = []
    submitted = threading.Event()

    def counted(request):
        read[-1].append(request.next_pass)
        return prefill(request)

    def counting_step(loop):
        assert submitted.wait(60)
        read.append([])
        step(loop)

    monkeypatch.setattr(engine, "PREFILL_TOKENS", 8)
    monkeypatch.setattr(engine, "LONG_PART", 5)
    monkeypatch.setattr(Request, "prefill", counted)
    monkeypatch.setattr(EngineLoop, "step", counting_step)
    monkeypatch.setattr(EngineLoop, "hurry", lambda loop: hurries.append(sum(read[-1])))
    with Engine(model, drafter=None, max_rows=9) as decoder:
        running = decoder.submit([9], max_new_tokens=100)
        next(iter(running))
        prompts = [[5] * 3, [6] * 4, [7] * 12, [8] * 5, [9, 9]]
        handles = [decoder.submit(ids, max_new_tokens=20) for ids in prompts]
        submitted.set()
        for ids, handle in zip(prompts, handles, strict=True):
            assert handle.result(60) == text_of(model, ids, max_new_tokens=20)
    assert [each for each in read if each] == [[1], [3, 4], [8], [4], [5, 2]]
    assert hurries == [7, 8, 7]


@pytest.mark.parametrize("drafter", ["ngram", "head"])
def test_waiting_and_prompts_are_no_part_of_a_step(model, monkeypatch, drafter):
    """An engine that waits for requests, or reads their prompts, does not look slow to the controller."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    prefill = Request.prefill

    def long_prefill(request):
        now[0] += 1000.0
        return prefill(request)

    monkeypatch.setattr(Request, "prefill", long_prefill)
    with Engine(
        model, drafter=DRAFTERS[drafter](), speculation=SpeculationConfig(clock=clock)
    ) as decoder:
        for _ in range(3):
            first = decoder.submit([4, 5, 6] * 5, max_new_tokens=80)
            decoder.submit(PROMPT, max_new_tokens=40).result(60)  # joins the other one
            first.result(60)
            now[0] += 1000.0
        stats = decoder.stats()
    assert stats.steps > 100
    assert 0 < stats.timed_seconds < 10 and 0 < stats.plain_seconds < 10


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(model):
    expected, passes = text_of(model, max_new_tokens=9), []

    def fail_in_sixth_pass(*_):
        passes.append(1)
        if len(passes) == 6:
            raise RuntimeError("out of memory")

    hook = model.model.layers[0].register_forward_hook(fail_in_sixth_pass)
    try:
        with Engine(model, drafter=DRAFTERS["head"]()) as engine:
            handle = engine.submit(PROMPT, max_new_tokens=100)
            with pytest.raises(RuntimeError, match="out of memory"):
                handle.result(60)
            assert engine.submit(PROMPT, max_new_tokens=9).result(60) == expected
    finally:
        hook.remove()
    assert handle.finish_reason == "error"


def test_a_row_that_cant_join_ends_the_batch_and_the_engine_goes_on(model, monkeypatch):
    with Engine(model, drafter=None) as engine:
        running = engine.submit(PROMPT, max_new_tokens=100)
        next(iter(running))
        monkeypatch.setattr(SlotTarget, "adopt", lambda *_, **__: 1 / 0)
        joining = engine.submit(PROMPT, max_new_tokens=9)
        for handle in (joining, running):
            with pytest.raises(ZeroDivisionError):
                handle.result(60)
        monkeypatch.undo()
        assert engine.submit(PROMPT, max_new_tokens=9).result(60) == text_of(
            model, max_new_tokens=9
        )


def test_drafts_that_spoil_a_pass_cost_only_their_own_row():
    model = tiny_model("llama", "eager")
    texts = [text_of(model, [each] * 4, max_new_tokens=12) for each in range(3, 6)]
    tokens = unread_tokens(3, torch.tensor(texts), torch.tensor([3, 4, 5]))

    class Poison(Drafter):
        """Drafts poison for the rows whose text begins with 4."""

        joinable = True

        def join(self, context, rows, output):
            pass

        def propose(self, context):
            paths = [[tokens[:1]] if context.text(row)[0] == 4 else [[]] for row in context.rows]
            return DraftTree.from_paths(context.roots, paths)

    engine = Engine(model, drafter=Poison(), speculation="fixed")
    with poisoned(model, tokens, "embedding"), engine:
        handles = [engine.submit([each] * 4, max_new_tokens=12) for each in range(3, 6)]
        assert [handle.result(60) for handle in handles] == texts
    assert [handle.stats.reruns > 3 for handle in handles] == [False, True, False]


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_are_those_of_the_model(model, top):
    with Engine(model, drafter=DRAFTERS["ngram"](), speculation="fixed") as engine:
        ids = [4, 5, 6] * 5
        handle = engine.submit(ids, max_new_tokens=15, logprobs=top, do_sample=True, seed=3)
        bursts = list(handle)
    text = ids + handle.tokens
    scores = model(torch.tensor([text])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    given = [each for burst in bursts for each in burst.logprobs]
    assert len(given) == 15
    for row, token, each in zip(scores, handle.tokens, given, strict=True):
        assert each.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(top)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_stop_strings(model):
    arguments = dict(max_new_tokens=40, stop_strings=tiny_tokenizer().decode(text_of(model)[9]))
    expected = text_of(model, tokenizer=tiny_tokenizer(), **arguments)
    with Engine(model, drafter=None, tokenizer=tiny_tokenizer()) as engine:
        handle = engine.submit(PROMPT, **arguments)
        assert handle.result(60) == expected
    assert handle.finish_reason == "stop"


def test_tasks_read_bursts(model):
    async def read(engine, ids):
        handle = engine.submit(ids, max_new_tokens=20)
        return [token async for burst in handle for token in burst.tokens]

    async def read_all(engine):
        return await asyncio.gather(*(read(engine, [each, 7]) for each in range(2, 8)))

    with Engine(model, drafter=None, max_rows=3) as engine:
        texts = asyncio.run(read_all(engine))
    assert texts == [text_of(model, [each, 7], max_new_tokens=20) for each in range(2, 8)]


def test_limits(model):
    with Engine(model, drafter=None, max_rows=2, max_length=50, max_waiting=1) as engine:
        with pytest.raises(ValueError, match=r"may have 54 tokens with its prompt of 4.*admits 50"):
            engine.submit(PROMPT, max_new_tokens=50)
        with pytest.raises(
            ValueError, match=r"input_ids has shape \(2, 1\) and type torch.int64; expected"
        ):
            engine.submit([[1], [2]])
        running = [engine.submit(PROMPT, max_new_tokens=40) for _ in range(2)]
        for handle in running:
            next(iter(handle))
        engine.submit(PROMPT, max_new_tokens=40)
        with pytest.raises(EngineFullError, match="1 requests wait for a row"):
            engine.submit(PROMPT, max_new_tokens=40)
    with pytest.raises(EngineClosedError, match="shut down"):
        engine.submit(PROMPT, max_new_tokens=5)


def test_rows_share_the_tokens_of_the_cache(model):
    with Engine(model, drafter=None, max_rows=4, max_length=100, max_tokens=120) as engine:
        assert engine.max_length == 30 and engine.max_tokens == 120
        with pytest.raises(ValueError, match="this engine admits 30"):
            engine.submit(PROMPT, max_new_tokens=40)
        handles = [engine.submit(PROMPT, max_new_tokens=20) for _ in range(6)]
        texts = {tuple(each.result(60)) for each in handles}
        assert texts == {tuple(text_of(model, max_new_tokens=20))}


def test_requests_without_drafts(model):
    with Engine(model, drafter=DRAFTERS["ngram"](), speculation="fixed") as engine:
        ids = [4, 5, 6] * 5
        plain = engine.submit(ids, max_new_tokens=20, drafter=None)
        drafted = engine.submit(ids, max_new_tokens=20)
        assert plain.result(60) == drafted.result(60)
        with pytest.raises(
            ValueError, match="speculation of a request differs from that of the engine"
        ):
            engine.submit(ids, max_new_tokens=20, speculation="auto")
    assert plain.stats.drafts == 0 < drafted.stats.drafts


def test_shutdown_without_draining_cancels(model):
    engine = Engine(model, drafter=None, max_rows=1)
    handles = [engine.submit(PROMPT, max_new_tokens=120) for _ in range(3)]
    next(iter(handles[0]))
    engine.shutdown(drain=False)
    assert [each.finish_reason for each in handles] == ["cancelled"] * 3
    engine.shutdown()


def test_refusals(model):
    with pytest.raises(ValueError, match=r"DraftModelDrafter can't serve requests that join"):
        Engine(model, drafter=DRAFTERS["draft model, sampled"]())
    with pytest.raises(ValueError, match=r"max_rows must be at least 1, got 0"):
        Engine(model, max_rows=0)
    with pytest.raises(
        ValueError, match=r"max_tokens=15 leaves 1 tokens to each row of max_rows=8"
    ):
        Engine(model, max_rows=8, max_tokens=15)
    eager = tiny_model("llama", attn_implementation="flex_attention")
    with pytest.raises(
        ValueError, match=r"requests of LlamaForCausalLM can't join a batch: .*flex"
    ):
        Engine(eager, drafter=None)


@pytest.mark.parametrize(("prompt", "new"), [(20, 4), (12, 5), (12, 4)])
def test_requests_behind_a_change_of_the_rotation_are_refused(prompt, new):
    """A pass rotates all of its tokens like the last one, so texts on both sides can't share passes."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0}
    model = random_model("llama", rope_parameters=rope, max_position_embeddings=64)
    (ids,) = prompts((prompt,))[0].tolist()
    with Engine(model, drafter="ngram", max_rows=2) as running:
        if prompt + new <= 16:
            expected = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)
            handle = running.submit(ids, max_new_tokens=new, do_sample=False)
            assert ids + handle.result() == expected[0].tolist()
        else:
            with pytest.raises(
                CantJoinError, match=r"rotary embedding changes .* exceeds 16 tokens"
            ):
                running.submit(ids, max_new_tokens=new, do_sample=False)


def test_load_and_statistics(model):
    with Engine(model, drafter=DRAFTERS["ngram"](), max_rows=2) as engine:
        handles = [engine.submit([4, 5, 6] * 5, max_new_tokens=60) for _ in range(3)]
        next(iter(handles[0]))
        load = engine.load
        assert 1 <= load.running <= 2 and load.running + load.waiting <= 3
        assert load.max_tokens == 2 * engine.max_length and load.cached_tokens > 15
        for handle in handles:
            handle.result(60)
    assert engine.stats().emitted_tokens == 3 * 59  # the first token comes from the prompt
    assert engine.stats().steps == sum(handle.stats.steps for handle in handles)
