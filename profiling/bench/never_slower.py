"""Every drafter against plain decoding, call by call: is it ever slower?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from baselines.random_targets import (
    SHAPES,
    head_of,
    random_draft_of,
    random_head_of,
    random_prompts,
    random_target,
)

from bench.generate import (
    ADVERSARY,
    AUTO,
    BUNDLED,
    HEAD,
    PYTHON,
    Maker,
    bundled_contestants,
    bundled_prompts,
    random_contestants,
)
from specdec_ext import HeadDrafter, assets
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import PLAIN, Contestant, Prompt
from specdec_ext.evaluate.measuring import take_turns, wall_seconds
from specdec_ext.evaluate.speedup import Speedup, bootstrap

MODELS = (BUNDLED, *SHAPES)
NGRAM, RANDOM_HEAD = "specdec n-gram", "specdec random head"
LOOKAHEAD, SUFFIX, DRAFT_MODEL = "specdec lookahead", "specdec suffix", "specdec draft model"
DRAFTERS = (LOOKAHEAD, SUFFIX, DRAFT_MODEL, RANDOM_HEAD, NGRAM, ADVERSARY)
RANDOM_DEPTH = 7  # of the adversary's chains for a target with random weights
RANDOM_LENGTH = 64

Pair = tuple[str, str]
# (contestant, baseline) -> seconds of both for the same prompt, in order of measurement.
Seconds = dict[Pair, list[tuple[float, float]]]


def alternate(
    contestants: Mapping[str, Contestant],
    pairs: Sequence[Pair],
    prompts: Sequence[Prompt],
    repetitions: int,
) -> Seconds:
    """Measure the pairs one after the other; the two contestants of a pair take turns on every prompt.

    A machine that slows down then slows both. Which of the two runs first alternates over repetitions. One
    warm-up call of each precedes a pair, so that both are as warm as for a user who generates several texts
    with the same drafter.
    """
    seconds: Seconds = {}
    for pair in pairs:
        for name in pair:
            contestants[name](prompts[0])
        times = seconds[pair] = []
        for turn in range(repetitions):
            for prompt in prompts:
                calls = {name: partial(contestants[name], prompt) for name in pair}
                taken = take_turns(calls, 1, wall_seconds, first=turn + 1)
                times.append((taken[pair[0]][0], taken[pair[1]][0]))
    return seconds


def ratio(times: Sequence[tuple[float, float]], prompts: int) -> Speedup:
    """Median over repetitions of the ratio of the times for all prompts, with its interval."""
    turns = [times[i : i + prompts] for i in range(0, len(times), prompts)]
    ratios = [sum(theirs for _, theirs in turn) / sum(ours for ours, _ in turn) for turn in turns]
    return bootstrap(ratios, [1.0] * len(ratios))


def contestants_of(
    model: str, dtype: str, batch: int, count: int, tokens: int
) -> tuple[list[Any], dict[str, Maker], list[Prompt]]:
    """The models to run without end of sequence, the makers of all contestants, and the prompts."""
    kind, shared = getattr(torch, dtype), benchmark.generation_kwargs(tokens)
    if model == BUNDLED:
        target, draft = assets.load_target(kind), assets.load_draft(kind)
        head, makers = head_of(target), bundled_contestants(target, draft, shared)
        vocab_size = target.config.vocab_size
        prompts = bundled_prompts(PYTHON, count * batch, batch, vocab_size)[:count]
    else:
        target, draft = random_target(model, kind), random_draft_of(model, kind)
        head = random_head_of(model, kind)
        makers = random_contestants(model, target, shared, [], RANDOM_DEPTH)
        for name, drafter in (
            (LOOKAHEAD, "lookahead"), (SUFFIX, "suffix"), (DRAFT_MODEL, draft), (NGRAM, "ngram"),
        ):  # fmt: skip
            makers[name] = _maker(target, drafter, shared)
        prompts = random_prompts(target.config.vocab_size, batch, RANDOM_LENGTH, 1)
    makers[RANDOM_HEAD] = _maker(target, HeadDrafter(head), shared)
    return [target, draft], makers, prompts


def _maker(target: Any, drafter: Any, shared: Mapping[str, Any]) -> Maker:
    return lambda prompts: benchmark.ours(target, drafter, shared)


def measure(
    model: str, dtype: str, batch: int, count: int, tokens: int, repetitions: int
) -> tuple[dict[Pair, Speedup], Seconds]:
    """Ratios of every drafter to plain decoding and, for the bundled pair, of ``auto`` to its better part.

    Args:
        count: number of prompts for the bundled pair; a target with random weights has one.
        tokens: new tokens per call.
        repetitions: of all prompts.
    """
    is_bundled = model == BUNDLED
    drafters = [*DRAFTERS, *([HEAD, AUTO] if is_bundled else [])]
    parts = (NGRAM, HEAD) if is_bundled else ()
    pairs = [(name, PLAIN) for name in drafters] + [(AUTO, part) for part in parts]
    models, makers, prompts = contestants_of(model, dtype, batch, count, tokens)
    with benchmark.endless(*models):
        contestants = {name: makers[name](prompts) for name in (PLAIN, *drafters)}
        seconds = alternate(contestants, pairs, prompts, repetitions)
    ratios = {pair: ratio(times, len(prompts)) for pair, times in seconds.items()}
    if parts:
        worse = min(parts, key=lambda part: ratios[part, PLAIN].value)
        del ratios[AUTO, worse]
    return ratios, seconds
