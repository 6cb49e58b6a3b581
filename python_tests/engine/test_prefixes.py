"""Prompts that begin like earlier ones: what is reused has the bits that reading it again gives."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from helpers.drafters.every_drafter import DRAFTERS
from helpers.drafters.mtp_cases import needs_mtp
from helpers.models import zoo
from helpers.models.tiny import VOCAB, tiny_model
from helpers.versions import since

from specdec_ext import generate
from specdec_ext.engine import Engine, engine
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.engine.prefixes import PrefixCache
from specdec_ext.models.slots import PromptPart

PART = 8


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(engine, "PREFILL_TOKENS", PART)


def session(decoder, turns: int = 4, seed: int = 0, **arguments) -> list:
    """The handles of a session: each prompt is the one before, its answer, and something new."""
    rng, ids, handles = random.Random(seed), [], []
    for turn in range(turns):
        ids = ids + [rng.randrange(1, VOCAB) for _ in range(11)]
        handle = decoder.submit(ids, seed=turn, do_sample=True, **arguments)
        ids = ids + handle.result(60)
        handles.append(handle)
    return handles


@pytest.fixture
def newcomers(monkeypatch):
    """Keys, values and hidden states of the prompts of requests that have joined."""
    seen, join = [], EngineLoop.join

    def noted(loop, request, output):
        layers = request.target.cache.layers
        keys = [each for layer in layers for each in layer.read(0, layer.length)]
        seen.append([each.clone() for each in (*keys, *output.aux_hidden_states)])
        join(loop, request, output)

    monkeypatch.setattr(EngineLoop, "join", noted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3-window", "gpt2", "deepseek_v32"])
def test_a_session_has_the_bits_of_whole_prompts(name, dtype, newcomers):
    check_session(tiny_model(name, dtype=dtype), newcomers)


@since("5.24", "Models that run layers in loops")
def test_a_session_of_loops_has_the_bits_of_whole_prompts(newcomers):
    """The cache of a new request lacks the layers that a model has added to that of an earlier one."""
    model = zoo.build("dory")
    check_session(model, newcomers)
    assert len(newcomers[0]) > 2 * model.config.num_hidden_layers


def check_session(model, newcomers) -> None:
    """Compare texts, keys and values of a session with those without reuse."""
    texts = []
    for kept in (1000, 0):
        with Engine(model, drafter="ngram", speculation="fixed", prefix_tokens=kept) as decoder:
            handles = session(decoder, max_new_tokens=9)
        texts.append([handle.tokens for handle in handles])
        prompts = [handle.prompt_tokens for handle in handles]
        reusable = [0, *(length // PART * PART for length in prompts[:-1])]
        assert [handle.reused_tokens for handle in handles] == (reusable if kept else [0] * 4)
    assert texts[0] == texts[1]
    reused, whole = newcomers[:4], newcomers[4:]
    for one, other in zip(reused, whole, strict=True):
        assert len(one) >= 2
        for this, that in zip(one, other, strict=True):
            torch.testing.assert_close(this, that, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    ["head", "p-eagle", "medusa", "ngram", pytest.param("mtp", marks=needs_mtp), "draft model"],
)
def test_drafts_are_those_of_whole_prompts(name, newcomers):
    model, drafts = tiny_model("llama"), []
    for kept in (1000, 0):
        with Engine(
            model, drafter=DRAFTERS[name](), speculation="fixed", prefix_tokens=kept
        ) as decoder:
            handles = session(decoder, max_new_tokens=30)
        drafts.append([(handle.tokens, handle.stats.accepted_per_position) for handle in handles])
        assert bool(handles[-1].reused_tokens) == bool(kept)
    assert drafts[0] == drafts[1]
    for one, other in zip(newcomers[:4], newcomers[4:], strict=True):
        for this, that in zip(one, other, strict=True):
            torch.testing.assert_close(this, that, rtol=0, atol=0)


def test_requests_with_one_prompt_read_it_once():
    model, ids = tiny_model("llama"), list(range(1, 2 * PART + 1))
    with Engine(model, drafter=None) as decoder:
        handles = [
            decoder.submit(ids, seed=seed, do_sample=True, max_new_tokens=5) for seed in range(3)
        ]
        texts = [handle.result(60) for handle in handles]
    # At least the last token is read, so its part is.
    assert [handle.reused_tokens for handle in handles] == [0, PART, PART]
    for seed, text in enumerate(texts):
        prompt = torch.tensor([ids], device="cpu")
        alone = generate(model, prompt, drafter=None, seed=[seed], do_sample=True, max_new_tokens=5)
        assert text == alone[0, len(ids) :].tolist()


def test_an_error_of_the_cache_is_one_of_its_request_alone(monkeypatch):
    model, ids = tiny_model("llama"), list(range(1, 12))
    with Engine(model, drafter=None) as decoder:
        monkeypatch.setattr(PrefixCache, "find", lambda *_: 1 / 0)
        failed = decoder.submit(ids, max_new_tokens=5)
        with pytest.raises(ZeroDivisionError):
            failed.result(60)
        monkeypatch.undo()
        assert len(decoder.submit(ids, max_new_tokens=5).result(60)) == 5


class Reader:
    """Stands for a target that has read a prompt; its parts hold where they come from."""

    def prompt_part(self, begin, end, output):
        return PromptPart(end - begin, [], [[(output, begin)]], ())


def origins(cache: PrefixCache, ids: list[int]) -> list:
    return [part.slots[0][0] for part in cache.find(ids)]


def test_parts_are_found_by_all_tokens_up_to_their_end():
    cache = PrefixCache(2, 100)
    cache.keep([1, 2, 3, 4, 5], Reader(), "a")
    assert cache.num_tokens == 4  # the third part is not whole
    assert origins(cache, [1, 2, 3, 4, 5]) == [("a", 0), ("a", 2)]
    assert origins(cache, [1, 2, 3, 4]) == [("a", 0)]  # the last token is read
    assert origins(cache, [1, 2, 3, 9, 9]) == [("a", 0)]
    assert origins(cache, [9, 2, 3, 4, 5]) == []
    assert origins(cache, [1]) == origins(cache, []) == []
    cache.keep([1, 2, 7, 8], Reader(), "b")
    assert origins(cache, [1, 2, 7, 8, 9]) == [("a", 0), ("b", 2)]
    cache.keep([5, 6], Reader(), "c")
    assert origins(cache, [5, 6, 3, 4, 9]) == [("c", 0)]  # 3, 4 are known after 1, 2 only


def test_the_parts_that_were_not_used_for_the_longest_time_are_dropped():
    cache = PrefixCache(2, 7)  # three parts
    cache.keep([1, 2, 3, 4], Reader(), "a")
    cache.keep([5, 6], Reader(), "b")
    assert len(cache.find([1, 2, 3, 4, 9])) == 2  # used after "b"
    cache.keep([7, 8], Reader(), "c")
    assert cache.num_tokens == 6
    assert origins(cache, [5, 6, 9]) == []
    cache.keep([5, 6], Reader(), "d")
    # The second part of "a" goes before the first one, without which it is of no use.
    assert origins(cache, [1, 2, 3, 4, 9]) == [("a", 0)]
    cache.keep(list(range(20, 40)), Reader(), "e")
    assert origins(cache, list(range(20, 40))) == [("e", 0), ("e", 2), ("e", 4)]


def test_nothing_is_kept_without_room():
    cache = PrefixCache(8, 7)
    cache.keep(list(range(1, 30)), SimpleNamespace(), None)  # it would fail
    assert cache.num_tokens == 0 and cache.find(list(range(1, 30))) == []
