"""Limits that are reached inside blocks, errors in every place, many calls, many threads.

Each row's text is that of plain decoding. After an exception nothing of the package is left in the model, in
transformers' registries or in the thread, and the next call gives the right text.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.checks.traces import traces
from helpers.drafters.head_cases import head_of
from helpers.models import zoo
from helpers.models.tiny import (
    SHAPES,
    VOCAB,
    ScriptedDrafter,
    generated,
    greedy_text,
    noisy_chain,
    oracle_chain,
    oracle_tree,
    prompts,
    random_model,
    random_tree,
    tiny_model,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import DynamicCache, PreTrainedTokenizerFast, TextIteratorStreamer

import specdec_ext
from specdec_ext import HeadDrafter, LookaheadDrafter, NgramDrafter, SuffixDrafter
from specdec_ext.models.cache import layers as cache
from specdec_ext.models.slots import prefill
from specdec_ext.models.slots import target as slots

NEW_TOKENS = 14
RAGGED = (9, 3, 6)


def expected(name: str = "llama", lengths: tuple[int, ...] = RAGGED):
    """``(ids, mask, transformers' text)``."""
    return greedy_text(name, lengths, NEW_TOKENS)


def generate(shape=oracle_tree, name: str = "llama", lengths=RAGGED, **kwargs):
    """Our text; by default the drafter proposes the right tokens in a shape of ``tiny``."""
    ids, mask, text = expected(name, lengths)
    if "drafter" not in kwargs:
        kwargs["drafter"] = ScriptedDrafter(generated(text, ids.shape[1]), shape)
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False) | kwargs
    return specdec_ext.generate(tiny_model(name), ids, **kwargs)


# --- limits inside a block


@pytest.mark.parametrize("name", ["llama", "gemma3-window", "gpt2", "deepseek_v32"])
@pytest.mark.parametrize("shape", [oracle_chain, random_tree])
def test_cache_may_grow_inside_a_block(name, shape, monkeypatch):
    monkeypatch.setattr(slots, "FIRST_SLOTS", 2)
    monkeypatch.setattr(cache, "GROWTH", 3)
    copies = []
    allocate = cache.RollbackLayer._allocate
    monkeypatch.setattr(
        cache.RollbackLayer,
        "_allocate",
        staticmethod(lambda like, count: copies.append(count) or allocate(like, count)),
    )
    assert torch.equal(generate(shape, name), expected(name)[2])
    assert len(set(copies)) > 2


@functools.cache
def ends_before_the_last_position() -> tuple[torch.Tensor, int]:
    """A text of all 32 positions of a model, and the last column whose token is new in the generated text."""
    for seed in range(50):
        ids, _ = prompts((9,), seed)
        text = tiny_model("gpt2-short").generate(ids, max_new_tokens=23, do_sample=False)
        for end in (30, 29, 28):
            if text[0, end] not in text[0, 9:end]:
                return text, end
    pytest.fail("every text repeats itself")


def deep_chain(right, rng):
    return [[*right, *range(1, 9)]]


def deep_tree(right, rng):
    return [*oracle_tree(right, rng), *deep_chain(right, rng)]


@pytest.mark.parametrize("shape", [deep_chain, deep_tree])
def test_drafts_stay_within_learned_positions(shape):
    """The text ends before the last position; a draft would reach behind it."""
    model, (text, end) = tiny_model("gpt2-short"), ends_before_the_last_position()
    drafter = ScriptedDrafter([text[0, 9 : end + 1].tolist()], shape)
    kwargs = dict(max_new_tokens=60, do_sample=False, drafter=drafter)
    eos = int(text[0, end])
    actual = specdec_ext.generate(model, text[:, :9], eos_token_id=eos, **kwargs)
    assert torch.equal(actual, text[:, : end + 1])
    with pytest.raises(IndexError):  # as without drafts
        specdec_ext.generate(model, text[:, :9], **kwargs)


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
LONGROPE |= FACTORS
CHANGING = {
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 24),
    "longrope": ("llama", LONGROPE, 96),
    "recomputed": ("phi3", LONGROPE, 96),
}


@functools.cache
def changing(case: str):
    kind, rope, positions = CHANGING[case]
    overrides: dict = {"original_max_position_embeddings": 24} if kind == "phi3" else {}
    overrides |= {"rope_parameters": rope, "max_position_embeddings": positions}
    return random_model(kind, seed=5, **overrides)


@pytest.mark.parametrize("lengths", [(9,), (9, 4)], ids=["one", "ragged"])
@pytest.mark.parametrize("case", CHANGING)
def test_calls_across_a_change_of_rotary_embeddings_are_decoded_plainly(case, lengths):
    """Calls that end before the change are speculated on."""
    model, (ids, mask) = changing(case), prompts(lengths)
    kwargs = dict(attention_mask=mask, do_sample=False)
    across = model.generate(ids, max_new_tokens=30, **kwargs)
    plain = specdec_ext.generate(model, ids, max_new_tokens=30, drafter=None, **kwargs)
    assert torch.equal(plain, across)
    with pytest.warns(UserWarning, match="without speculation: its rotary embedding changes"):
        assert torch.equal(specdec_ext.generate(model, ids, max_new_tokens=30, **kwargs), across)
    drafter = ScriptedDrafter(generated(across, 9), oracle_chain)
    with pytest.raises(ValueError, match="exceeds 24 tokens, and this call may reach 39"):
        specdec_ext.generate(model, ids, max_new_tokens=30, drafter=drafter, **kwargs)
    before = specdec_ext.generate(model, ids, max_new_tokens=15, drafter=drafter, **kwargs)
    assert torch.equal(before, model.generate(ids, max_new_tokens=15, **kwargs))


@pytest.mark.parametrize("case", ["longrope", "recomputed"])
def test_calls_behind_the_change_are_speculated_on(case):
    model, (ids, _) = changing(case), prompts((27,))
    text = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    drafter = ScriptedDrafter(generated(text, 27), oracle_tree)
    actual = specdec_ext.generate(model, ids, max_new_tokens=NEW_TOKENS, drafter=drafter)
    assert torch.equal(actual, text)


@pytest.mark.parametrize("case", CHANGING)
def test_prompts_behind_the_change_are_read_as_one(case, monkeypatch):
    """In parts, the first tokens would be rotated like those of a short text."""
    monkeypatch.setattr(prefill, "DIRECT_COLUMNS", 8)
    # Two models, because a rotary embedding keeps the frequencies of the longest text so far.
    ours, theirs = (copy.deepcopy(changing(case)) for _ in range(2))
    for length in (9, 27):
        ids, kwargs = prompts((length,))[0], dict(max_new_tokens=NEW_TOKENS, do_sample=False)
        actual = specdec_ext.generate(ours, ids, drafter=None, **kwargs)
        assert torch.equal(actual, theirs.generate(ids, **kwargs))


# --- exceptions


class Stop(Exception):
    pass


def bomb(error: type[BaseException], calls: int):
    """A function that raises ``error`` in its ``calls``-th call and before it returns its last argument."""
    count = 0

    def explode(*args, **kwargs):
        nonlocal count
        count += 1
        if count == calls:
            raise error
        return args[-1]

    return explode


class BadDrafter(ScriptedDrafter):
    """Calls ``explode`` in one of its methods."""

    def __init__(self, where: str, explode):
        super().__init__(generated(expected()[2], 9), noisy_chain)
        self.where, self.explode = where, explode

    def feature_layers(self, model):
        return (1, -1)

    def start(self, context, model, output):
        if self.where == "start":
            self.explode(None)

    def propose(self, context):
        if self.where == "propose":
            self.explode(None)
        return super().propose(context)

    def commit(self, context, accepted, output):
        if self.where == "commit":
            self.explode(None)


class BadStreamer:
    def __init__(self, explode):
        self.put, self.end = explode, lambda: None


def failing(where: str, explode) -> dict:
    """Keywords with which a call fails in this place."""
    return {
        "processor": lambda: {"logits_processor": [explode]},
        "criterion": lambda: {
            "stopping_criteria": [
                lambda ids, scores: torch.zeros(len(ids)).bool() | bool(explode(0))
            ]
        },
        "streamer": lambda: {"streamer": BadStreamer(explode)},
        "start": lambda: {"drafter": BadDrafter("start", explode)},
        "propose": lambda: {"drafter": BadDrafter("propose", explode)},
        "commit": lambda: {"drafter": BadDrafter("commit", explode)},
    }[where]()


@pytest.mark.parametrize("calls", [1, 2, 4])
@pytest.mark.parametrize(
    "where", ["processor", "criterion", "streamer", "start", "propose", "commit"]
)
def test_exception_leaves_no_traces(where, calls):
    model, before = tiny_model("llama"), traces(tiny_model("llama"))
    given = DynamicCache(config=model.config)
    kwargs = failing(where, bomb(Stop, 1 if where == "start" else calls))
    with pytest.raises(Stop):
        generate(past_key_values=given, **kwargs)
    assert traces(model) == before
    assert given.get_seq_length() == 0
    assert torch.equal(generate(past_key_values=given), expected()[2])
    assert given.get_seq_length() == expected()[2].shape[1] - 1


@pytest.mark.parametrize("name", ["falcon_h1", "minimax", "xlnet"])
def test_text_after_an_exception_is_right_with_other_caches(name):
    """Recurrent states, a cache of the model's own class, passes that transformers prepares."""
    model, (ids, mask) = zoo.build(name), prompts((9,))
    kwargs = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    text = model.generate(ids, **kwargs)
    made = generated(text, 9) if specdec_ext.supports(model).chain else None
    kwargs["drafter"] = made and ScriptedDrafter(made, noisy_chain)
    for calls in (1, 4):
        with pytest.raises(Stop):
            specdec_ext.generate(model, ids, logits_processor=[bomb(Stop, calls)], **kwargs)
        assert torch.equal(specdec_ext.generate(model, ids, **kwargs), text)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_interrupt_inside_a_pass_leaves_no_traces(passes, error):
    """In a middle layer, while masks, linears and hooks for hidden states of the package are in place."""
    model = tiny_model("llama")
    before = traces(model)
    given = DynamicCache(config=model.config)
    explode = bomb(error, passes)
    handle = model.model.layers[1].register_forward_hook(lambda *args: explode(None))
    try:
        with pytest.raises(error):
            generate(drafter=BadDrafter("never", None), past_key_values=given)
    finally:
        handle.remove()
    assert traces(model) == before
    assert torch.equal(generate(past_key_values=given), expected()[2])


def test_drafter_can_be_used_after_a_failed_call():
    text = expected()[2]
    for drafter in (
        HeadDrafter(head_of("eagle3")),
        SuffixDrafter(),
        LookaheadDrafter(),
        specdec_ext.DraftModelDrafter(tiny_model("qwen3")),
    ):
        with pytest.raises(Stop):
            generate(drafter=drafter, logits_processor=[bomb(Stop, 5)])
        assert torch.equal(generate(drafter=drafter), text)


# --- streamers that are iterators


def letters() -> PreTrainedTokenizerFast:
    words = {f"w{i} ": i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0 ")))


@pytest.mark.parametrize("reader", ["slow", "stopped"])
def test_text_can_be_read_in_another_thread(reader):
    """A slow reader gets the whole text; generation does not wait for a reader that stopped."""
    text = expected(lengths=(9,))[2]
    tokenizer = letters()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, lengths=(9,), streamer=streamer)
        pieces = []
        for piece in streamer:
            pieces.append(piece)
            if reader == "stopped":
                break
            threading.Event().wait(0.003)
        assert torch.equal(running.result(timeout=60), text)
    whole = tokenizer.decode(text[0, 9:])
    assert "".join(pieces) == whole if reader == "slow" else whole.startswith(pieces[0])


# --- threads

JOBS = [
    ("llama", lambda: NgramDrafter(min_ngram=1), (9, 3, 6), {}),
    ("llama", lambda: HeadDrafter(head_of("eagle3")), (9,), {"do_sample": True, "seed": 3}),
    ("llama", LookaheadDrafter, (4, 9), {"repetition_penalty": 1.3}),
    ("gemma2-window", lambda: NgramDrafter(min_ngram=1), (12, 5), {}),
    ("llama", lambda: None, (9, 3), {}),
    ("gpt2", lambda: specdec_ext.DraftModelDrafter(tiny_model("llama")), (7,), {}),
]


def our_text(job) -> torch.Tensor:
    name, drafter, lengths, options = job
    ids, mask = prompts(lengths)
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS) | options
    return specdec_ext.generate(tiny_model(name), ids, drafter=drafter(), **kwargs)


def text_of_transformers(job) -> torch.Tensor:
    name, _, lengths, _ = job
    ids, mask = prompts(lengths)
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tiny_model(name).generate(ids, **kwargs)


def test_threads_do_not_change_texts():
    """One model in several threads, several models, and transformers' own generate at the same time."""
    tasks = [(our_text, job) for job in JOBS] + [(text_of_transformers, job) for job in JOBS[:4]]
    alone = [task(job) for task, job in tasks]
    models = {name: tiny_model(name) for name, *_ in JOBS}
    before = {name: traces(model) for name, model in models.items()}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda task: task[0](task[1]), tasks * 2))
    finally:
        sys.setswitchinterval(interval)
    for result, one in zip(together, alone * 2, strict=True):
        assert torch.equal(result, one)
    assert {name: traces(model) for name, model in models.items()} == before


# --- many calls


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def calls(count: int) -> None:
    drafters = [NgramDrafter(), HeadDrafter(head_of("eagle3")), LookaheadDrafter(), "auto", None]
    for i in range(count):
        options = {"drafter": drafters[i % len(drafters)], "max_new_tokens": 6}
        if i % 7 == 0:
            options |= {"output_hidden_states": True, "return_dict_in_generate": True}
        if i % 11 == 0:
            with pytest.raises(Stop):
                generate(logits_processor=[bomb(Stop, 3)], **options)
        else:
            generate(**options)


@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_calls_do_not_leak_memory(count):
    """No tensor is left, and after many calls less than 0.1 kB for each."""
    calls(35)  # every kind of call once, because the first one fills caches
    model = tiny_model("llama")
    before, alive = traces(model), tensors()
    memory = resident()
    calls(count)
    assert tensors() == alive
    assert traces(model) == before
    if count > 1000:
        assert resident() - memory < 20 * 2**20


# --- random batches

ROWS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4)


@functools.cache
def row_alone(name: str, text: tuple[int, ...], new_tokens: int) -> list[int]:
    """The tokens that transformers generates after one text."""
    ids = torch.tensor([text])
    mask = torch.ones_like(ids)
    kwargs = dict(attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return generated(tiny_model(name).generate(ids, **kwargs), len(text))[0]


def check_batch(name, rows, seed, shape, new_tokens, eos, chunk, pad):
    """Check that each row has its text without the others, with any paddings, ends and drafts."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, rows))
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        places = torch.tensor(row).long()
        places[int(torch.randint(len(row), (), generator=generator))] = 1
        start = int(torch.randint(width - len(row) + 1, (), generator=generator))
        mask[i, start : start + len(row)] = places
    ids = torch.randint(1, VOCAB, mask.shape, generator=generator)
    texts = [tuple(row[keep].tolist()) for row, keep in zip(ids, mask.bool(), strict=True)]
    answers = [row_alone(name, text, new_tokens) for text in texts]
    ends = [
        next((i + 1 for i, token in enumerate(row) if token in eos), new_tokens) for row in answers
    ]
    longest = max(ends)
    want = [row[:end] + [pad] * (longest - end) for row, end in zip(answers, ends, strict=True)]
    kwargs = dict(attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    kwargs |= dict(eos_token_id=sorted(eos) or None, pad_token_id=pad, prefill_chunk_size=chunk)
    drafter = ScriptedDrafter(answers, shape, seed)
    actual = specdec_ext.generate(tiny_model(name), ids, drafter=drafter, **kwargs)
    assert generated(actual, width) == want


batches = given(
    name=st.sampled_from(["llama", "mistral-window", "gpt2", "gemma3-window"]),
    rows=ROWS,
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(SHAPES),
    new_tokens=st.integers(1, 16),
    eos=st.sets(st.integers(1, VOCAB - 1), max_size=12),
    chunk=st.none() | st.integers(1, 13),
    pad=st.integers(0, VOCAB - 1),
)
quiet = functools.partial(
    settings, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


@quiet(max_examples=25, derandomize=True)
@batches
def test_random_batches(**case):
    check_batch(**case)


@pytest.mark.slow
@quiet(max_examples=600)
@batches
def test_many_random_batches(**case):
    check_batch(**case)
