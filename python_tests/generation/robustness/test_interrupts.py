"""After an interrupt at any instruction all changes are undone, and the next call gives the right text.

Python raises interrupts between two instructions of any code, ``__exit__`` and ``finally`` included. Some
tests raise at each instruction of the code that makes and undoes changes; others send signals at random
times.
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
from helpers.checks.traces import traces
from helpers.drafters.checkpoint_cases import random_head
from helpers.models import zoo
from helpers.models.tiny import ScriptedDrafter, generated, oracle_tree
from torch.autograd import grad_mode
from transformers import DynamicCache, LlamaForCausalLM

import specdec_ext
from specdec_ext import HeadDrafter, generation
from specdec_ext.models.families import griffin, patches, scans
from specdec_ext.models.passes import hidden_states, masks
from specdec_ext.models.patching import changes, forwards

# Changes differ: forwards and attention; forwards, hooks and masks of windows; positions; scans; states that
# modules hold; states of Mamba alone.
ARCHITECTURES = ["llama", "gemma2", "mistral", "gpt2", "falcon_h1", "recurrent_gemma", "mamba"]
NEW_TOKENS = 8


class Case:
    """A model with prompts, its text, and drafters: a script and, except for Mamba, a head."""

    def __init__(self, name: str):
        self.model = zoo.build(name)
        self.ids = torch.tensor([[5, 6, 7, 8, 5, 6], [0, 0, 0, 9, 8, 7]])
        mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
        self.kwargs: dict[str, Any] = dict(
            attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        self.text = self.model.generate(self.ids, **self.kwargs)
        size = self.model.config.get_text_config(decoder=True).hidden_size
        sizes = dict(hidden_size=size, target_hidden_size=size)
        sizes |= dict(vocab_size=zoo.VOCAB, draft_vocab_size=zoo.VOCAB)
        head = random_head(**sizes, feature_layers=(0, 1, -1))
        script = ScriptedDrafter(generated(self.text, self.ids.shape[1]), oracle_tree)
        self.drafters = [script] if name == "mamba" else [script, HeadDrafter(head)]

    def generate(self, turn: int = 0, **kwargs: Any) -> torch.Tensor:
        drafter = self.drafters[turn % len(self.drafters)]
        kwargs = {**self.kwargs, "drafter": drafter, "speculation": "fixed", **kwargs}
        return specdec_ext.generate(self.model, self.ids, **kwargs)

    def is_exact(self) -> bool:
        plain = self.model.generate(self.ids, **self.kwargs)
        ours = [self.generate(turn) for turn in range(len(self.drafters))]
        return all(torch.equal(text, self.text) for text in (plain, *ours))


@functools.cache
def case(name: str) -> Case:
    made = Case(name)
    assert made.is_exact()  # also fills caches of the first use
    return made


# --- at every instruction

Moment = tuple[CodeType, int, int]  # a function, an instruction of it, and its number of executions
_WATCHED = {
    each.__file__
    for each in (changes, forwards, hidden_states, griffin, masks, patches, scans, generation)
} | {contextlib.__file__, grad_mode.__file__}


class Tracer:
    """Counts the executed instructions of the watched files, and may raise at one of them."""

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
    """The first and the last execution of every instruction in a call."""
    tracer = Tracer()
    tracer.run(function)
    return [(*where, time) for where, count in tracer.counts.items() for time in sorted({1, count})]


@pytest.mark.parametrize("stride", [101, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama", "falcon_h1", "recurrent_gemma"])
def test_interrupt_at_any_instruction_leaves_no_traces(name, stride):
    at = case(name)
    before = traces(at.model)
    call = functools.partial(at.generate, 1)
    tried = moments(call)
    assert len(tried) > 1000
    for moment in tried[stride // 2 :: stride]:
        cache = DynamicCache(config=at.model.config)
        with contextlib.suppress(
            KeyboardInterrupt
        ):  # Python ignores it while it closes a generator
            Tracer(moment).run(functools.partial(call, past_key_values=cache))
        after = traces(at.model)
        assert after == before, moment
    assert at.is_exact()


# --- at random times


class Storm:
    """A signal whose handler raises, as those of Ctrl-C and of timeouts do, but only inside ``generate``.

    Args:
        delay: seconds until the first signal.
        interval: seconds between further signals, 0 for none.
    """

    def __init__(self, delay: float, interval: float = 0.0):
        self.delay, self.interval = delay, interval
        self.raised = 0
        self.dropped = 0  # by Python, in a finaliser or in the callback of a weak reference

    def _raise(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is specdec_ext.generate.__code__:
                self.raised += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, self._raise)
        hook = sys.unraisablehook

        def count(details: Any) -> None:
            self.dropped += issubclass(details.exc_type, KeyboardInterrupt)
            hook(details)

        sys.unraisablehook = count
        try:
            signal.setitimer(signal.ITIMER_REAL, self.delay, self.interval)
            yield
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            sys.unraisablehook = hook


def seconds_of(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


@pytest.mark.parametrize("count", [12, pytest.param(340, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_interrupts_at_random_times_leave_no_traces(name, count):
    """The caller's empty cache stays empty."""
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
        if storm.raised == storm.dropped:
            continue
        if cache is not None:
            assert cache.get_seq_length() == 0
            assert torch.equal(at.generate(turn, past_key_values=cache), at.text)
        if turn % 8 == 0:
            assert at.is_exact()
    assert raised > count / 4  # fewer on a machine that became slower
    assert at.is_exact()


@pytest.mark.parametrize("count", [12, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gemma2", "falcon_h1"])
def test_interrupted_call_leaves_a_filled_cache_unchanged_or_empty(name, count):
    """The interrupted call is the second turn of a dialogue."""
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
def test_repeated_interrupts_leave_no_traces(count):
    """Every half a millisecond, also while changes are undone."""
    at, rng = case("gemma2"), random.Random(0)
    before = traces(at.model)
    for turn in range(count):
        storm = Storm(rng.uniform(1e-4, 0.02), interval=5e-4)
        with storm.around():
            at.generate(turn)
        assert traces(at.model) == before, turn
    assert at.is_exact()


def test_interrupt_does_not_disturb_a_call_in_another_thread():
    """Both calls use one model."""
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
    """Interrupted between the end of the loop and the end of ``generate``."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        super().generate(*args, **kwargs)
        raise KeyboardInterrupt


def test_interrupt_behind_the_loop_empties_the_cache():
    """The text is lost, so its cache is of no use."""
    at = case("llama")
    model = copy.copy(at.model)
    model.__class__ = Late
    cache = DynamicCache(config=model.config)
    with pytest.raises(KeyboardInterrupt):
        specdec_ext.generate(model, at.ids, past_key_values=cache, drafter="ngram", **at.kwargs)
    assert cache.get_seq_length() == 0


# --- the parts


def test_changes_left_by_an_interrupt_are_undone_before_the_next_call():
    at, left = case("llama"), []
    journal = changes.Changes()
    journal.make("something", [(lambda: left.append(1), left.clear)])
    del journal  # as if each attempt to undo it was interrupted
    assert left == [1]
    at.generate()
    assert left == []


def test_interrupted_undo_is_repeated():
    """The interrupt is raised when all changes are undone."""
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


def test_gradient_mode_is_restored():
    """An interrupt of ``torch.no_grad`` leaves it changed."""

    @changes.transactional
    def call() -> None:
        torch.set_grad_enabled(False)

    with torch.enable_grad():
        call()
        assert torch.is_grad_enabled()


def test_failed_undo_is_an_error():
    def broken() -> None:
        raise ZeroDivisionError

    @changes.transactional
    def call() -> None:
        changes.current_changes().make("broken", [(lambda: None, broken)])

    with pytest.raises(ZeroDivisionError):
        call()


def test_only_one_module_enters_inference_mode():
    """torch.inference_mode leaves the mode when its object is destroyed, after the gradient mode was
    restored."""
    root = Path(specdec_ext.__file__).parent
    sources = [*root.glob("*.py"), *(root / "models").rglob("*.py")]
    sources += (root / "drafters").rglob("*.py")
    naming = [path.name for path in sources if "torch.inference_mode(" in path.read_text()]
    assert len(sources) > 60 and naming == ["changes.py"]
