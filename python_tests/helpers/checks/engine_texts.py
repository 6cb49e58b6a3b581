"""Random requests to an engine at random times, and the texts that ``generate`` has for them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from helpers.models.tiny import VOCAB
from transformers import PreTrainedModel

from specdec_ext import generate
from specdec_ext.engine import Engine

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


def random_calls(
    count: int, longest: int, vocab: int = VOCAB, seed: int = 0
) -> list[tuple[list[int], dict[str, Any]]]:
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


def alone(model: PreTrainedModel, ids: list[int], drafter: Any, **arguments: Any) -> list[int]:
    """The new tokens of ``generate`` for this prompt alone."""
    if "seed" in arguments:
        arguments["seed"] = [arguments["seed"]]
    prompt = torch.tensor([ids])
    return generate(model, prompt, drafter=drafter, **arguments)[0, len(ids) :].tolist()


def check_texts(
    model: PreTrainedModel,
    make: Callable[[], Any],
    calls: list[tuple[list[int], dict[str, Any]]],
    seed: int = 0,
    **options: Any,
) -> Engine:
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
