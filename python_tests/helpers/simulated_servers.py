"""Contestants whose requests are simulated step by step, with the noise of a real machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        of_prompt = np.random.default_rng(number)
        chance = of_prompt.beta(20 * self.acceptance, 20 - 20 * self.acceptance)
        pace *= self._noise.lognormal(0, 0.03)
        now, written = 0.1 * pace, 1
        reply.arrivals = [(now, 1)]
        stats = SpeculationStats(drafter="server", accepted_per_position=[0] * self.length)
        while written < tokens:
            most = min(self.length, tokens - written - 1)
            accepted = int(np.cumprod(of_prompt.random(self.length) < chance)[:most].sum())
            cost = 1 + self.draft_cost * self.length
            slow = 3.0 if self._noise.random() < self.hiccups else 1.0
            now += PLAIN_STEP * cost * pace * slow * self._noise.lognormal(0, 0.04)
            written += 1 + accepted
            reply.arrivals.append((now, 1 + accepted))
            stats.drafts += 1
            stats.draft_tokens += self.length
            stats.accepted_tokens += accepted
            for position in range(accepted):
                stats.accepted_per_position[position] += 1
        reply.events, reply.ended, reply.stats = [1] * len(reply.arrivals), now, stats
        return reply


def plain(seed: int, **options: Any) -> Simulated:
    """A server without drafts."""
    return Simulated(seed, acceptance=1e-9, length=0, **options)
