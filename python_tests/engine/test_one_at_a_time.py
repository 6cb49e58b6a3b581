"""The engine that decodes one request at a time: texts, order, cancelling, limits, shutdown, logprobs."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import LogitsProcessor

import specdec_ext
from specdec_ext import assets
from specdec_ext.engine import SerialEngine
from specdec_ext.errors import EngineClosedError, EngineFullError

PROMPT = "import os\n\n\ndef read(path):\n"


@pytest.fixture(scope="module")
def target():
    return assets.load_target()


@pytest.fixture(scope="module")
def ids():
    return assets.load_tokenizer()(PROMPT)["input_ids"]


class Gate(LogitsProcessor):
    """Holds a request at its first token until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, input_ids, scores):
        self.reached.set()
        assert self.opened.wait(60)
        return scores


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise RuntimeError("broken processor")


def alone(target, ids, **kwargs):
    output = specdec_ext.generate(target, torch.tensor([ids]), **kwargs)
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("drafter", ["auto", None, "ngram"])
def test_texts_are_those_of_the_calls_alone(target, ids, drafter):
    with SerialEngine(target, drafter=drafter) as engine:
        greedy = engine.submit(ids, max_new_tokens=48, do_sample=False)
        sampled = engine.submit(ids, max_new_tokens=48, do_sample=True, seed=5)
        bursts = list(greedy)
    assert greedy.result() == alone(target, ids, max_new_tokens=48, do_sample=False)
    assert sampled.result() == alone(target, ids, max_new_tokens=48, do_sample=True, seed=5)
    assert [token for burst in bursts for token in burst.tokens] == greedy.tokens
    assert sum(map(sum, (burst.drafted for burst in bursts))) == greedy.stats.accepted_tokens
    # The prompt pass and each step are a burst.
    assert len(bursts) == 1 + greedy.stats.steps
    assert greedy.finish_reason == "length"
    times = greedy.times
    assert times.submitted < times.started < times.first_token < times.finished


def test_a_request_chooses_its_speculation(target, ids):
    with SerialEngine(target, drafter="ngram") as engine:
        plain = engine.submit(ids, max_new_tokens=32, do_sample=False, drafter=None)
        fixed = engine.submit(ids, max_new_tokens=32, do_sample=False, speculation="fixed")
    assert plain.result() == fixed.result()
    assert plain.stats.policy == "none" and fixed.stats.policy == "fixed"
    assert engine.stats().steps == plain.stats.steps + fixed.stats.steps
    assert engine.stats().accepted_per_position == fixed.stats.accepted_per_position


def test_end_of_sequence_and_stop_strings_are_stops(target, ids):
    text = alone(target, ids, max_new_tokens=16, do_sample=False)
    tokenizer = assets.load_tokenizer()
    with SerialEngine(target, tokenizer=tokenizer) as engine:
        ended = engine.submit(ids, max_new_tokens=16, do_sample=False, eos_token_id=text[5])
        stop = tokenizer.decode(text[5:7])
        stopped = engine.submit(ids, max_new_tokens=16, do_sample=False, stop_strings=[stop])
    assert ended.result() == text[: text.index(text[5]) + 1] and ended.finish_reason == "stop"
    assert len(stopped.result()) < 16 and stopped.finish_reason == "stop"


def test_logprobs_are_those_of_the_logits(target, ids):
    with SerialEngine(target) as engine:
        handle = engine.submit(
            ids, max_new_tokens=12, do_sample=True, temperature=0.5, seed=1, logprobs=3
        )
        given = [each for burst in handle for each in burst.logprobs]
    text = torch.tensor([ids + handle.tokens])
    with torch.no_grad():
        expected = target(text).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    for row, token, each in zip(expected, handle.tokens, given, strict=True):
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [token for token, _ in each.top] == row.topk(3).indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )


def test_cancelled_requests_end_and_others_go_on(target, ids):
    gate = Gate()
    with SerialEngine(target) as engine:
        running = engine.submit(ids, max_new_tokens=400, logits_processor=[gate])
        waiting = engine.submit(ids, max_new_tokens=4)
        last = engine.submit(ids, max_new_tokens=4, do_sample=False)
        assert gate.reached.wait(60)
        assert (engine.load.running, engine.load.waiting) == (1, 2)
        assert engine.load.cached_tokens >= len(ids)
        running.cancel()
        waiting.cancel()
        assert engine.load.waiting == 1
        gate.opened.set()
        assert last.result(60) == alone(target, ids, max_new_tokens=4, do_sample=False)
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert len(running.tokens) < 400 and not waiting.tokens


def test_a_failing_request_disturbs_no_other(target, ids):
    with SerialEngine(target) as engine:
        failing = engine.submit(ids, max_new_tokens=4, logits_processor=[Failing()])
        other = engine.submit(ids, max_new_tokens=4, do_sample=False)
        with pytest.raises(RuntimeError, match="broken processor"):
            failing.result(60)
        assert other.result(60) == alone(target, ids, max_new_tokens=4, do_sample=False)
    assert failing.finish_reason == "error"


def test_a_full_engine_refuses_and_recovers(target, ids):
    gate = Gate()
    with SerialEngine(target, max_waiting=1) as engine:
        first = engine.submit(ids, max_new_tokens=2, logits_processor=[gate])
        assert gate.reached.wait(60)
        second = engine.submit(ids, max_new_tokens=2)
        with pytest.raises(EngineFullError, match="max_waiting=1"):
            engine.submit(ids, max_new_tokens=2)
        second.cancel()
        third = engine.submit(ids, max_new_tokens=2)
        gate.opened.set()
        assert len(first.result(60)) == len(third.result(60)) == 2


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_finishes_or_cancels(target, ids, drain):
    gate = Gate()
    engine = SerialEngine(target)
    handles = [
        engine.submit(ids, max_new_tokens=100, logits_processor=[gate]),
        engine.submit(ids, max_new_tokens=3),
    ]
    assert gate.reached.wait(60)
    with pytest.raises(TimeoutError, match=r"within 0\.01"):
        engine.shutdown(drain=drain, timeout=0.01)
    gate.opened.set()
    engine.shutdown(drain=drain, timeout=60)
    ended = {handle.finish_reason for handle in handles}
    assert ended == ({"length"} if drain else {"cancelled"})
    with pytest.raises(EngineClosedError, match="shut down"):
        engine.submit(ids, max_new_tokens=3)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"input_ids": []}, "at least one id"),
        ({"input_ids": [0.5]}, "list of ids"),
        ({"input_ids": [[1, 2], [3, 4]]}, r"\[1, length\]"),
        ({"input_ids": [5, 4096]}, "the id 4096; expected ids in"),
        ({"input_ids": [-1]}, "the id -1"),
        ({"max_new_tokens": None}, "max_new_tokens is None"),
        ({"max_new_tokens": 500}, "the engine and the model admit 512"),
        ({"max_new_tokens": 90}, "the engine and the model admit 100"),
        ({"seed": 2**63}, "64-bit"),
        ({"logprobs": -1}, "logprobs must be in"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"streamer": object()}, "streamer is not an argument of a request"),
        ({"num_return_sequences": 2}, "num_return_sequences is not an argument of a request"),
        ({"speculation": "always"}, "speculation='always'"),
        ({"stop_strings": ["x"]}, "tokenizer"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(target, given, message):
    budget = {"max_tokens": 100} if given.get("max_new_tokens") == 90 else {}
    with SerialEngine(target, **budget) as engine:
        arguments = {"input_ids": [1] * 20, "max_new_tokens": 4, **given}
        with pytest.raises(ValueError, match=message):
            engine.submit(**arguments)
        assert engine.load.waiting == engine.load.running == 0


@pytest.mark.parametrize("given", [{"max_rows": 0}, {"max_tokens": 0}, {"max_waiting": -1}])
def test_bad_limits_are_refused(target, given):
    with pytest.raises(ValueError, match=f"{next(iter(given))} must be at least"):
        SerialEngine(target, **given)
