"""Contestants whose requests are simulated step by step, with the noise of a real machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from specdec_ext.evaluate.benchmark.client import COMPLETIONS
from specdec_ext.evaluate.benchmark.prompts import Question
from specdec_ext.evaluate.benchmark.reply import Reply
from specdec_ext.evaluate.benchmark.served import Turn
from specdec_ext.stats import SpeculationStats

PLAIN_STEP = 0.020  # seconds
QUESTIONS = [Question(str(number), "code", (f"prompt {number}",)) for number in range(32)]


def text_of(question: Question) -> str:
    return f"text of {question.name}"


class SimulatedServer:
    """What a rollout asks of a server beside the requests that are measured."""

    model, is_ours, endpoint = "none", True, COMPLETIONS

    def __init__(self, name: str, text: Callable[[Question], str]):
        self.name, self.text = name, text

    def ask_whole(self, question: Question, **options: Any) -> dict[str, Any]:
        """The characters of the text as tokens, of which the server is rather sure."""
        tokens = list(self.text(question))
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [-0.1] * len(tokens),
            "top_logprobs": [{token: -0.1, "#": -3.0} for token in tokens],
        }
        return {"choices": [{"text": "".join(tokens), "logprobs": logprobs}]}


@dataclass
class Simulated:
    """A server that drafts chains.

    Times vary by turn (the machine is warmer, or shared), by request and by step, and one step in 300 takes
    three times as long. Greedy texts and their drafts are the same in every turn, so acceptance varies by
    prompt only.

    Attributes:
        seed: of the noise; two servers with different seeds are equal but for it.
        acceptance: mean conditional acceptance; 0 does not draft.
        length: draft length.
        draft_cost: time of each draft token in plain steps.
        slowness: factor on all times.
        hiccups: share of steps that take three times as long.
        text: the text of a question.
        fails: numbers of the questions whose requests fail.
    """

    seed: int
    acceptance: float = 0.7
    length: int = 4
    draft_cost: float = 0.08
    slowness: float = 1.0
    hiccups: float = 1 / 300
    text: Callable[[Question], str] = text_of
    fails: Sequence[int] = ()
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._noise = np.random.default_rng(self.seed)
        self.server = SimulatedServer(f"simulated {self.seed}", self.text)

    def turn(self, asked: Sequence[Question], streams: int, **options: Any) -> Turn:
        pace = self.slowness * self._noise.lognormal(0, 0.01)
        replies = [self._reply(each, pace, options["max_tokens"]) for each in asked]
        return Turn(replies, sum(reply.seconds for reply in replies) / streams)

    def _reply(self, question: Question, pace: float, tokens: int) -> Reply:
        reply = Reply(0.0, counts=True, text=self.text(question), tokens=tokens, prompt_tokens=50)
        number = int(question.text.split()[-1])
        if number in self.fails:
            reply.error, reply.ended = "the stream ended before the text did", 1.0
            return reply
        accepted, stats = _drafted(number, self.acceptance, self.length, tokens)
        pace *= self._noise.lognormal(0, 0.03)
        slow = np.where(self._noise.random(len(accepted)) < self.hiccups, 3.0, 1.0)
        steps = slow * self._noise.lognormal(0, 0.04, len(accepted))
        cost = PLAIN_STEP * (1 + self.draft_cost * self.length)
        times = pace * (0.1 + cost * np.cumsum(steps))
        reply.arrivals = [(0.1 * pace, 1)]
        reply.arrivals += [
            (float(now), 1 + count) for now, count in zip(times, accepted, strict=True)
        ]
        reply.events, reply.ended = [1] * len(reply.arrivals), reply.arrivals[-1][0]
        reply.stats = stats
        return reply


@cache
def _drafted(
    number: int, acceptance: float, length: int, tokens: int
) -> tuple[list[int], SpeculationStats]:
    """The accepted tokens of each draft for a text, which are the same in every turn, and their counts."""
    of_prompt = np.random.default_rng(number)
    chance = of_prompt.beta(20 * acceptance, 20 - 20 * acceptance)
    found, written = [], 1
    while written < tokens:
        most = min(length, tokens - written - 1)
        found.append(int(np.cumprod(of_prompt.random(length) < chance)[:most].sum()))
        written += 1 + found[-1]
    up_to = [sum(count >= position for count in found) for position in range(1, length + 1)]
    stats = SpeculationStats(
        drafter="server",
        drafts=len(found),
        draft_tokens=length * len(found),
        accepted_tokens=sum(found),
        accepted_per_position=up_to,
    )
    return found, stats


def plain(seed: int, **options: Any) -> Simulated:
    """A server without drafts."""
    return Simulated(seed, acceptance=1e-9, length=0, **options)
