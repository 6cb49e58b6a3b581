"""Interrupts at any moment: whatever a call had changed is undone, and the next call gives the right text.

An interrupt is an exception that Python raises between two steps of any code, ``__exit__`` and ``finally``
included. Two kinds of tests: one raises at a chosen instruction of the code that changes things and undoes
them, and so meets every moment for certain; the other sends signals at random times, to all code.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import zoo
from checkpoint_cases import random_head
from tiny import ScriptedDrafter, generated, oracle_tree
from torch.autograd import grad_mode
from traces import traces
from transformers import DynamicCache, LlamaForCausalLM

import specdec_ext
from specdec_ext import HeadDrafter, generation
from specdec_ext.models.families import griffin as held
from specdec_ext.models.families import patches as placements
from specdec_ext.models.families import scans
from specdec_ext.models.passes import features, masks
from specdec_ext.models.patching import changes, forwards

# What they change: forwards and attention; forwards, taps and masks of windows; positions; scans; states that
# modules hold; the states of Mamba alone.
ARCHITECTURES = ["llama", "gemma2", "mistral", "gpt2", "falcon_h1", "recurrent_gemma", "mamba"]
NEW_TOKENS = 8


class Case:
    """One model with its prompts, drafted by a head where it has layers to tap, else by a script."""

    def __init__(self, name: str):
        self.model = zoo.build(name)
        self.ids = torch.tensor([[5, 6, 7, 8, 5, 6], [0, 0, 0, 9, 8, 7]])
        mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
        self.kwargs: dict[str, Any] = dict(
            attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        self.text = self.model.generate(self.ids, **self.kwargs)
        size = self.model.config.get_text_config(decoder=True).hidden_size
        head = random_head(
            "eagle3",
            torch.float32,
            0,
            hidden_size=size,
            target_hidden_size=size,
            vocab_size=zoo.VOCAB,
            draft_vocab_size=zoo.VOCAB,
            feature_layers=(0, 1, -1),
        )
        script = ScriptedDrafter(generated(self.text, self.ids.shape[1]), oracle_tree)
        self.drafters = [script] if name == "mamba" else [script, HeadDrafter(head)]

    def generate(self, turn: int = 0, **kwargs: Any) -> torch.Tensor:
        drafter = self.drafters[turn % len(self.drafters)]
        kwargs = {**self.kwargs, **kwargs}
        return specdec_ext.generate(
            self.model, self.ids, drafter=drafter, speculation="fixed", **kwargs
        )

    def is_exact(self) -> bool:
        plain = self.model.generate(self.ids, **self.kwargs)
        ours = [self.generate(turn) for turn in range(len(self.drafters))]
        return all(torch.equal(text, self.text) for text in (plain, *ours))


@functools.cache
def case(name: str) -> Case:
    made = Case(name)
    assert made.is_exact()  # and what is made at first use is there
    return made


# --- at every instruction

Moment = tuple[
    CodeType, int, int
]  # instruction of a function, and the how manieth time it is reached
_WATCHED = {
    each.__file__
    for each in (changes, forwards, features, held, masks, placements, scans, generation)
} | {contextlib.__file__, grad_mode.__file__}


class Tracer:
    """Sees the instructions of the watched files that a call executes, and may raise at one of them."""

    def __init__(self, at: Moment | None = None):
        self.at = at
        self.counts: dict[tuple[CodeType, int], int] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Tracer | None:
        if event == "call":
            if frame.f_code.co_filename not in _WATCHED:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            where = frame.f_code, frame.f_lasti
            self.counts[where] = self.counts.get(where, 0) + 1
            if self.at == (*where, self.counts[where]):
                raise KeyboardInterrupt
        return self

    def run(self, function: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        finally:
            sys.settrace(before)


def moments(function: Callable[[], Any]) -> list[Moment]:
    """The first and the last time of every instruction that a call executes."""
    tracer = Tracer()
    tracer.run(function)
    return [(*where, time) for where, count in tracer.counts.items() for time in sorted({1, count})]


@pytest.mark.parametrize("stride", [41, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama", "falcon_h1", "recurrent_gemma"])
def test_at_every_instruction(name, stride):
    at = case(name)
    before = traces(at.model)
    call = functools.partial(at.generate, 1)
    tried = moments(call)
    assert len(tried) > 2000
    for moment in tried[stride // 2 :: stride]:
        cache = DynamicCache(config=at.model.config)
        with contextlib.suppress(KeyboardInterrupt):  # not raised where a generator is closed
            Tracer(moment).run(functools.partial(call, past_key_values=cache))
        after = traces(at.model)
        assert after == before, moment
    assert at.is_exact()


# --- at random times


class Storm:
    """A signal whose handler raises, as those of Ctrl-C and of timeouts do, but inside ``generate`` alone.

    Args:
        delay: seconds until the first.
        interval: seconds between further ones, 0 for none.
    """

    def __init__(self, delay: float, interval: float = 0.0):
        self.delay, self.interval = delay, interval
        self.raised = 0

    def _raise(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is specdec_ext.generate.__code__:
                self.raised += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, self._raise)
        try:
            signal.setitimer(signal.ITIMER_REAL, self.delay, self.interval)
            yield
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def seconds_of(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


@pytest.mark.parametrize("count", [25, pytest.param(340, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_storm(name, count):
    """One interrupt in each of many calls; a cache that was given is as it was or empty."""
    at, rng = case(name), random.Random(name)
    before, raised = traces(at.model), 0
    span = min(seconds_of(functools.partial(at.generate, turn)) for turn in range(3))
    for turn in range(count):
        cache = None if name == "mamba" else DynamicCache(config=at.model.config)
        storm = Storm(rng.uniform(1e-4, 1.1 * span))
        with storm.around():
            at.generate(turn, past_key_values=cache)
        assert traces(at.model) == before, turn
        raised += storm.raised
        if not storm.raised:
            continue
        if cache is not None:
            assert cache.get_seq_length() == 0
            assert torch.equal(at.generate(turn, past_key_values=cache), at.text)
        if turn % 8 == 0:
            assert at.is_exact()
    assert raised > count / 4  # a machine that becomes slower in the meantime is hit less often
    assert at.is_exact()


@pytest.mark.parametrize("count", [12, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gemma2", "falcon_h1"])
def test_a_filled_cache_is_as_it_was_or_empty(name, count):
    """The second turn of a dialogue, interrupted: the caller can tell what became of the first."""
    at, rng = case(name), random.Random(name)
    longer = torch.cat([at.text, at.ids[:, -2:]], dim=1)
    mask = torch.cat([at.kwargs["attention_mask"], torch.ones(2, NEW_TOKENS + 2).long()], dim=1)
    second = {**at.kwargs, "attention_mask": mask}
    expected = at.model.generate(longer, **second)

    def turn(cache: DynamicCache | None) -> torch.Tensor:
        return specdec_ext.generate(at.model, longer, past_key_values=cache, **second)

    span, seen = seconds_of(lambda: turn(None)), set()
    for _ in range(count):
        cache = DynamicCache(config=at.model.config)
        at.generate(past_key_values=cache)
        held = cache.get_seq_length()
        storm = Storm(rng.uniform(1e-4, 0.6 * span))
        with storm.around():
            turn(cache)
        if not storm.raised:
            continue
        seen.add(cache.get_seq_length())
        assert seen <= {0, held}
        assert torch.equal(turn(cache), expected)
    assert seen


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_storm_that_goes_on(count):
    """Interrupts every half a millisecond, while changes are undone, too."""
    at, rng = case("gemma2"), random.Random(0)
    before = traces(at.model)
    for turn in range(count):
        storm = Storm(rng.uniform(1e-4, 0.02), interval=5e-4)
        with storm.around():
            at.generate(turn)
        assert traces(at.model) == before, turn
    assert at.is_exact()


def test_another_thread_is_not_disturbed():
    """Two calls on one model: what the interrupted one takes back is not what the other one needs."""
    at, rng = case("gemma2"), random.Random(0)
    before, texts, over = traces(at.model), [], threading.Event()

    def others() -> None:
        while not over.is_set():
            texts.append(at.generate())

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(25):
            with Storm(rng.uniform(1e-4, 0.03)).around():
                at.generate(1)
    finally:
        over.set()
        thread.join()
    assert texts and all(torch.equal(text, at.text) for text in texts)
    assert traces(at.model) == before
    assert at.is_exact()


class Late(LlamaForCausalLM):
    """Interrupted when the loop has ended and ``generate`` has not."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        super().generate(*args, **kwargs)
        raise KeyboardInterrupt


def test_interrupted_behind_the_loop():
    """The text is lost, so its cache is no use to anybody."""
    at = case("llama")
    model = copy.copy(at.model)
    model.__class__ = Late
    cache = DynamicCache(config=model.config)
    with pytest.raises(KeyboardInterrupt):
        specdec_ext.generate(model, at.ids, past_key_values=cache, drafter="ngram", **at.kwargs)
    assert cache.get_seq_length() == 0


# --- the parts


def test_whatever_is_left_behind_is_undone_before_the_next_call():
    at, left = case("llama"), []
    journal = changes.Changes()
    journal.make("something", [(lambda: left.append(1), left.clear)])
    del journal  # the call was interrupted in every attempt to undo it
    assert left == [1]
    at.generate()
    assert left == []


def test_undone_although_interrupted():
    """An entry that is interrupted is tried again; the interrupt is raised when all are undone."""
    place, attempts = {"forward": 1}, []

    def interrupted() -> None:
        attempts.append(1)
        if len(attempts) < 5:
            raise KeyboardInterrupt

    @changes.transactional
    def call() -> None:
        made = changes.current_changes()
        made.patch("place", lambda: [(place, "forward", lambda original: original + 1)])
        made.make("other", [(lambda: None, interrupted)])
        assert place == {"forward": 2}

    with pytest.raises(KeyboardInterrupt):
        call()
    assert place == {"forward": 1} and len(attempts) == 5


def test_modes_of_gradients_are_put_right():
    """What an interrupt of ``torch.no_grad`` leaves, in transformers' code or in ours."""

    @changes.transactional
    def call() -> None:
        torch.set_grad_enabled(False)

    with torch.enable_grad():
        call()
        assert torch.is_grad_enabled()


def test_what_cannot_be_undone_is_an_error():
    def broken() -> None:
        raise ZeroDivisionError

    @changes.transactional
    def call() -> None:
        changes.current_changes().make("broken", [(lambda: None, broken)])

    with pytest.raises(ZeroDivisionError):
        call()


def test_one_place_enters_inference_mode():
    """torch's own leaves it when its object is destroyed, after the mode of gradients was put right."""
    root = Path(specdec_ext.__file__).parent
    sources = [
        *(root / "models").rglob("*.py"),
        *(root / "drafters").rglob("*.py"),
        *root.glob("*.py"),
    ]
    naming = [path.name for path in sources if "torch.inference_mode(" in path.read_text()]
    assert len(sources) > 60 and naming == ["changes.py"]
