"""``ParallelEngine`` in one process; with two: python_tests/cluster/test_two_ranks.py."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.serving import alone, ids_of, target, tokenizer, until

from specdec_ext.engine import parallel
from specdec_ext.engine.parallel import ParallelEngine

PROMPTS = ["import os\n", "def read(path):\n", "class Queue:\n", "x = [\n", "import re\n"]


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def engine(group):
    with ParallelEngine(target(), tokenizer=tokenizer(), speculation="fixed", max_rows=2) as one:
        yield one


def test_texts_are_those_of_single_calls(engine):
    greedy = [engine.submit(ids_of(prompt), max_new_tokens=12) for prompt in PROMPTS]
    sampled = engine.submit(ids_of(PROMPTS[0]), max_new_tokens=12, do_sample=True, seed=5)
    for prompt, handle in zip(PROMPTS, greedy, strict=True):
        assert handle.result(60) == alone(ids_of(prompt), max_new_tokens=12)
    assert sampled.result(60) == alone(
        ids_of(PROMPTS[0]), max_new_tokens=12, do_sample=True, seed=5
    )
    drawn = engine.submit(ids_of(PROMPTS[0]), max_new_tokens=12, do_sample=True)
    assert len(drawn.result(60)) == 12


def test_a_request_is_cancelled_between_two_steps_only(engine, monkeypatch):
    """If it were cancelled as soon as its caller says so, the ranks would part within a step."""
    begun, go = threading.Event(), threading.Event()
    step = type(engine._loop).step
    seen = []

    def slow(loop):
        begun.set()
        assert go.wait(30)
        seen.append(handle.is_cancelled)
        step(loop)

    monkeypatch.setattr(type(engine._loop), "step", slow)
    handle = engine.submit(ids_of(PROMPTS[0]), max_new_tokens=300)
    assert begun.wait(30)
    handle.cancel()
    assert not handle.is_cancelled
    go.set()
    until(lambda: handle.finish_reason is not None)
    assert handle.finish_reason == "cancelled" and seen == [False]


def test_what_cant_be_sent_is_refused(engine):
    with pytest.raises(ValueError, match="can't be sent to the other processes"):
        engine.submit([1], max_new_tokens=2, logits_processor=[lambda ids, scores: scores])
    assert engine.submit([1], max_new_tokens=2).result(60)


def test_waiting_requests_count_before_they_are_told(engine):
    with engine._changed:
        engine._arriving.extend([None] * 3)
        assert engine.load.waiting == 3
        engine._arriving.clear()


def test_a_failure_ends_the_engine_its_requests_and_is_told(group, monkeypatch):
    told = threading.Event()
    with ParallelEngine(target(), max_rows=2, on_failure=told.set) as engine:
        broken = ZeroDivisionError("broken")

        def fail(self):
            raise broken

        monkeypatch.setattr(type(engine._loop), "step", fail)
        monkeypatch.setattr(threading, "excepthook", lambda *_: None)
        handle = engine.submit(ids_of(PROMPTS[0]), max_new_tokens=20)
        with pytest.raises(ZeroDivisionError):
            handle.result(30)
        assert told.wait(30) and engine.failure is broken
        assert not engine.is_open


def test_other_ranks_take_no_requests(engine, monkeypatch):
    monkeypatch.setattr(engine, "rank", 1)
    with pytest.raises(RuntimeError, match="rank 1 takes no requests"):
        engine.submit([1], max_new_tokens=2)


def test_processes_must_be_set_up():
    with pytest.raises(ValueError, match="start them with torchrun"):
        ParallelEngine(target())


def test_other_ranks_wait_longer_than_torch_lets_them():
    assert parallel._LONGEST_WAIT.days > 30
