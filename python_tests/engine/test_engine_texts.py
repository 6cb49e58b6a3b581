"""The text of a request is the one that ``generate`` returns for it alone, whatever else is running."""

import random

import pytest
import torch
from helpers.checks.engine_texts import SAMPLING, alone, check_texts, random_calls
from helpers.drafters.every_drafter import DRAFTERS
from helpers.models.tiny import tiny_model

from specdec_ext import CombinedDrafter, HeadDrafter, NgramDrafter, assets
from specdec_ext.engine import Engine, engine
from specdec_ext.engine import loop as engine_loop

JOINABLE = [
    name for name, make in DRAFTERS.items() if (drafter := make()) is None or drafter.joinable
]


@pytest.mark.parametrize("name", JOINABLE)
def test_texts_with_every_drafter(name, monkeypatch):
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 8)  # most prompts are read in several steps
    model = tiny_model("llama")
    decoder = check_texts(model, DRAFTERS[name], random_calls(24, 30), max_rows=5)
    stats = decoder.stats()
    assert stats.emitted_tokens > 150
    assert (stats.drafts > 0) == (name != "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3-window", "gpt2", "deepseek_v32"])
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


@pytest.mark.parametrize("name", ["head", "ngram", "medusa", "lookahead", "draft model", "mtp"])
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
