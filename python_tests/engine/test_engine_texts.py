"""The text of a request is the one that ``generate`` returns for it alone, whatever else is running."""

import random
import time

import pytest
import torch
from helpers.drafters.every_drafter import DRAFTERS
from helpers.models.tiny import VOCAB, tiny_model

from specdec_ext import CombinedDrafter, HeadDrafter, NgramDrafter, assets, generate
from specdec_ext.engine import Engine, engine
from specdec_ext.engine import loop as engine_loop

JOINABLE = [
    name for name, make in DRAFTERS.items() if (drafter := make()) is None or drafter.joinable
]
SAMPLING = [
    {},
    dict(do_sample=True, temperature=0.7),
    dict(do_sample=True, temperature=1.2, top_k=12),
    dict(do_sample=True, top_p=0.8, min_p=0.05),
]
# Processors that read the text, on the device and on the host, and one that looks at the scores alone.
PROCESSORS = [
    {},
    {},
    {},
    dict(repetition_penalty=1.3),
    dict(no_repeat_ngram_size=3, bad_words_ids=[[5], [7, 8]]),
    dict(typical_p=0.9),
]


def random_calls(count: int, longest: int, vocab: int = VOCAB, seed: int = 0) -> list[tuple]:
    """``(ids, arguments)`` of calls of one row; every fifth prompt repeats itself, so lookups find drafts."""
    rng = random.Random(seed)
    calls = []
    for number in range(count):
        ids = [rng.randrange(1, vocab) for _ in range(rng.randrange(1, longest))]
        if number % 5 == 0:
            ids = (ids * 3)[:longest]
        arguments = dict(max_new_tokens=rng.choice([1, 2, 9, 20, 33]), eos_token_id=[3, 4])
        arguments |= rng.choice(SAMPLING) | rng.choice(PROCESSORS)
        if arguments.get("do_sample"):
            arguments["seed"] = number
        calls.append((ids, arguments))
    return calls


def alone(model, ids: list[int], drafter, **arguments) -> list[int]:
    """The new tokens of ``generate`` for this prompt alone."""
    if "seed" in arguments:
        arguments["seed"] = [arguments["seed"]]
    prompt = torch.tensor([ids])
    return generate(model, prompt, drafter=drafter, **arguments)[0, len(ids) :].tolist()


def check_texts(model, make, calls, seed: int = 0, **options) -> Engine:
    """Submit calls at random times and compare their texts with those of ``generate``."""
    rng = random.Random(seed)
    with Engine(model, drafter=make(), **options) as decoder:
        handles = []
        for ids, arguments in calls:
            handles.append(decoder.submit(ids, **arguments))
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.03)
        texts = [handle.result(timeout=300) for handle in handles]
    for (ids, arguments), text in zip(calls, texts, strict=True):
        assert text == alone(model, ids, None, **arguments), arguments
    return decoder


@pytest.mark.parametrize("name", JOINABLE)
def test_texts_with_every_drafter(name, monkeypatch):
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 8)  # most prompts are read in several steps
    model = tiny_model("llama")
    decoder = check_texts(model, DRAFTERS[name], random_calls(24, 30), max_rows=5)
    stats = decoder.stats()
    assert stats.emitted_tokens > 150
    assert (stats.drafts > 0) == (name != "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3-window", "gpt2"])
def test_texts_of_architectures(architecture, dtype):
    model = tiny_model(architecture, dtype=dtype)
    make = DRAFTERS["ngram"]
    check_texts(model, make, random_calls(20, 24), max_rows=4, speculation="fixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_of_64_requests_to_the_bundled_pair(dtype):
    model, tokenizer = assets.load_target(dtype), assets.load_tokenizer()
    texts = [tokenizer(each["prompt"]).input_ids for each in assets.held_out_prompts()]
    rng = random.Random(1)
    calls = []
    for _, arguments in random_calls(64, 2, seed=2):
        arguments.pop("eos_token_id")
        arguments.pop("bad_words_ids", None)
        calls.append((rng.choice(texts)[: rng.choice([3, 30, 90, 300])], arguments))
    head = assets.load_head()
    make = lambda: CombinedDrafter(NgramDrafter(), HeadDrafter(head))  # noqa: E731
    check_texts(model, make, calls, max_rows=8, tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["head", "ngram", "medusa", "lookahead"])
def test_rows_take_the_place_of_ended_ones_without_a_trace(name):
    """After the same text, a joined row is drafted for as a call of its own is."""
    model, drafter = tiny_model("llama"), DRAFTERS[name]()
    propose, drafts = drafter.propose, {}

    def noted(context):
        tree = propose(context)
        for row, tokens in zip(context.rows, tree.token_lists, strict=True):
            drafts[tuple(context.text(row))] = tokens
        return tree

    drafter.propose = noted
    calls = [(ids, dict(max_new_tokens=12)) for ids, _ in random_calls(8, 20, seed=5)]
    with Engine(model, drafter=drafter, max_rows=2, speculation="fixed") as decoder:
        for handle in [decoder.submit(ids, **arguments) for ids, arguments in calls]:
            handle.result(60)
    shared, drafts = drafts, {}
    for ids, arguments in calls:
        alone(model, ids, drafter, speculation="fixed", **arguments)
    common = shared.keys() & drafts.keys()
    assert len(common) > 20
    for text in common:
        for one, other in zip(shared[text], drafts[text], strict=False):
            assert one == other


def test_one_place_serves_requests_of_any_sampling():
    """The place and the number of rows stay the same, but not the noise and the filters."""
    calls = []
    for number, sampling in enumerate(SAMPLING * 2):
        seed = dict(seed=number) if sampling else {}
        calls.append(([5, 9, 10 + number], dict(max_new_tokens=20, **sampling, **seed)))
    check_texts(tiny_model("llama"), DRAFTERS["ngram"], calls, max_rows=1)


def test_requests_join_while_others_are_decoded(monkeypatch):
    """Not one batch after another: a short request that comes later ends before a long one."""
    model = tiny_model("llama")
    joined = []
    join = engine_loop.EngineLoop.join

    def noted(self, request, output):
        joined.append(len(self.context.rows))
        join(self, request, output)

    monkeypatch.setattr(engine_loop.EngineLoop, "join", noted)
    with Engine(model, drafter=None, max_rows=3) as decoder:
        long = decoder.submit([5, 6], max_new_tokens=100)
        next(iter(long))
        short = [decoder.submit([7, 8, each], max_new_tokens=3) for each in range(4)]
        for handle in short:
            handle.result(60)
        assert long.finish_reason is None
        assert len(long.result(60)) == 100
    assert joined[0] == 0 and set(joined[1:]) <= {1, 2}
