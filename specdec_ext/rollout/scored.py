"""Texts with log probabilities, as servers with OpenAI's API tell them, and near-ties between two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from specdec_ext.evaluate.benchmark.client import CHAT, Server
from specdec_ext.evaluate.benchmark.prompts import Question
from specdec_ext.heads.checkpoints.config.fields import Fields, shown

ALTERNATIVES = (
    5  # most probable tokens that are told at each place; vLLM allows up to 20, OpenAI's API 5
)
# Largest difference of log probabilities that rounding explains. Logits between 16 and 32 are multiples of
# 1/8 in bfloat16. Servers that differ by more compute with other weights.
MAX_ROUNDING = 0.25

Difference = Literal["near-tie", "other text", "unknown"]


@dataclass(frozen=True)
class ScoredToken:
    """A token of a text.

    Attributes:
        text: its text.
        logprob: its log probability.
        top: the most probable tokens at this place with their log probabilities.
    """

    text: str
    logprob: float
    top: dict[str, float]


def scored_text(server: Server, question: Question, **options: Any) -> list[ScoredToken]:
    """Ask a server again, for the log probabilities of its tokens.

    Raises:
        ValueError: if it does not tell them, or tells them wrongly.
    """
    if server.endpoint == CHAT:
        options |= {"logprobs": True, "top_logprobs": ALTERNATIVES}
    else:
        options |= {"logprobs": ALTERNATIVES}
    answer = server.ask_whole(question, **options)
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError(f"{server.name} sent choices {shown(choices)}; expected one object")
    told = Fields(choices[0], f"{server.name}'s choice").section("logprobs")
    if server.endpoint == CHAT:
        return _of_chat(told)
    return _of_completion(told)


def _of_completion(told: Fields) -> list[ScoredToken]:
    tokens, logprobs, tops = (
        _list(told, name) for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    if not len(tokens) == len(logprobs) == len(tops):
        raise ValueError(f"{told.where} has lists of different lengths")
    return [
        _token(told, text, logprob, top if isinstance(top, dict) else {})
        for text, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]


def _of_chat(told: Fields) -> list[ScoredToken]:
    found = []
    for each in _list(told, "content"):
        if not isinstance(each, dict):
            raise ValueError(f"{told.where} has {shown(each)}; expected an object")
        entry = Fields(each, told.where)
        top = {
            other["token"]: other.get("logprob")
            for other in _list(entry, "top_logprobs")
            if isinstance(other, dict) and isinstance(other.get("token"), str)
        }
        found.append(_token(told, each.get("token"), each.get("logprob"), top))
    return found


def _list(told: Fields, name: str) -> list[Any]:
    value = told.values.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{told.where} has no list {name}; the server tells no log probabilities")
    return value


def _token(told: Fields, text: Any, logprob: Any, top: dict[str, Any]) -> ScoredToken:
    if not isinstance(text, str) or not all(map(_is_logprob, (logprob, *top.values()))):
        raise ValueError(
            f"{told.where} has the token {shown(text)} with {shown(logprob)} and {shown(top)}; expected a "
            "text and log probabilities"
        )
    return ScoredToken(text, float(logprob), {name: float(value) for name, value in top.items()})


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def judge(
    expected: str, found: str, baseline: list[ScoredToken], candidate: list[ScoredToken]
) -> tuple[Difference, str]:
    """Whether two greedy texts differ by a near-tie, and why.

    They do if the baseline's log probabilities of the two tokens, where the texts begin to differ, are at
    most twice the rounding error apart, as in :func:`specdec_ext.compare_runs`. The rounding error is the
    largest difference between the two servers' log probabilities of the same tokens after the same text. A
    difference above ``MAX_ROUNDING`` has another cause.

    Args:
        expected, found: the texts of baseline and candidate that differ.
        baseline, candidate: what the two tell when they are asked again.
    """
    at = _first_difference(expected, found)
    before, place = "", 0
    while place < len(baseline) and len(before) + len(baseline[place].text) <= at:
        before += baseline[place].text
        place += 1
    if place == len(baseline) or not expected.startswith(before + baseline[place].text):
        return "unknown", "the baseline writes another text when it is asked again"
    rounding = _rounding(baseline[: place + 1], candidate)
    if rounding > MAX_ROUNDING:
        return "other text", (
            f"the log probabilities of the common text differ by up to {rounding:.2g}, more than rounding "
            "explains"
        )
    chosen, rest = baseline[place], found[len(before) :]
    others = [text for text in chosen.top if text and text != chosen.text and rest.startswith(text)]
    if not others:
        return "other text", (
            f"the candidate's token is not among the {len(chosen.top)} that the baseline finds most probable"
        )
    gap = chosen.logprob - chosen.top[max(others, key=len)]
    verdict: Difference = "near-tie" if gap <= 2 * rounding else "other text"
    return verdict, f"log probabilities {gap:.2g} apart, rounding explains {2 * rounding:.2g}"


def _rounding(baseline: list[ScoredToken], candidate: list[ScoredToken]) -> float:
    """The largest difference of log probabilities, as far as the two wrote the same text."""
    errors = [0.0]
    for ours, theirs in zip(baseline, candidate, strict=False):
        errors += [
            abs(value - theirs.top[text]) for text, value in ours.top.items() if text in theirs.top
        ]
        if ours.text != theirs.text:
            break
        errors.append(abs(ours.logprob - theirs.logprob))
    return max(errors)


def _first_difference(expected: str, found: str) -> int:
    common = min(len(expected), len(found))
    return next((i for i in range(common) if expected[i] != found[i]), common)
