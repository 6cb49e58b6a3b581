"""Texts that differ: near-ties by the log probabilities of two servers, and answers that are not trusted."""

from __future__ import annotations

import pytest
from helpers.fake_server import fake_server

pytest.importorskip("httpx2", reason="httpx2 is not installed (extra: serve)")

from specdec_ext.evaluate.benchmark.client import CHAT, COMPLETIONS, Server
from specdec_ext.evaluate.benchmark.prompts import Question
from specdec_ext.rollout.scored import ScoredToken, judge, scored_text

SAME = ScoredToken("ab", -0.5, {"ab": -0.5, "x": -2.0})


def shifted(token, by):
    return ScoredToken(
        token.text, token.logprob + by, {text: value + by for text, value in token.top.items()}
    )


def last(chosen, gap):
    """The last token of the text ``"ab c..."``, beside another one."""
    other = {" cd": " ce", " ce": " cd"}[chosen]
    return ScoredToken(chosen, -0.7, {chosen: -0.7, other: -0.7 - gap})


@pytest.mark.parametrize(
    ("gap", "rounding", "verdict"),
    [
        (0.0, 0.0, "near-tie"),
        (0.01, 0.01, "near-tie"),
        (0.02, 0.01, "near-tie"),
        (0.021, 0.01, "other text"),
        (0.01, 0.0, "other text"),
        (0.39, 0.2, "near-tie"),
        (0.4, 0.3, "other text"),  # no rounding is as large as that
        (3.0, 0.001, "other text"),
    ],
)
def test_a_near_tie_is_within_twice_the_rounding_error(gap, rounding, verdict):
    baseline = [SAME, last(" cd", gap)]
    candidate = [shifted(SAME, rounding), last(" ce", 0.0)]
    candidate[1] = ScoredToken(" ce", -0.7, {})
    found, why = judge("ab cdx", "ab cex", baseline, candidate)
    assert found == verdict, why


def test_the_rounding_error_is_also_that_of_the_tokens_that_differ():
    baseline, candidate = [last(" cd", 0.1)], [last(" ce", 0.1)]
    assert judge(" cd", " ce", baseline, candidate)[0] == "near-tie"


def test_a_token_that_nobody_expects_is_another_text():
    found, why = judge("ab cd", "ab zz", [SAME, last(" cd", 0.0)], [SAME])
    assert found == "other text" and "not among the 2" in why


def test_text_after_the_first_difference_does_not_count():
    candidate = [SAME, last(" ce", 0.0), ScoredToken("!", -9.0, {})]
    baseline = [SAME, last(" cd", 0.0), ScoredToken("?", -0.1, {})]
    assert judge("ab cd?", "ab ce!", baseline, candidate)[0] == "near-tie"


def test_a_text_that_ends_early_is_another_text():
    assert judge("ab cd", "ab", [SAME, last(" cd", 0.0)], [SAME])[0] == "other text"


@pytest.mark.parametrize("expected", ["something else", "ab cd and more", "ab ce"])
def test_a_baseline_that_writes_another_text_decides_nothing(expected):
    baseline = [SAME, last(" cd", 0.0)]
    found = expected + "?" if expected != "ab ce" else "ab cf"
    verdict, why = judge(expected, found, baseline, baseline)
    assert verdict == "unknown" and "when it is asked again" in why


# --- answers of servers --------------------------------------------------------------------------------

QUESTION = Question("0", "", ("def f(x):",), True)


def asked(answer, endpoint=COMPLETIONS):
    with fake_server() as fake:
        fake.answer = lambda body: (200, answer)
        with Server(fake.url, "fake") as server:
            server.endpoint = endpoint
            try:
                return scored_text(server, QUESTION, max_tokens=4), fake.bodies[-1]
            except ValueError as error:
                return str(error), fake.bodies[-1]


def completion(**logprobs):
    full = {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"a": -1, "b": -2.5}]}
    return {"choices": [{"text": "a", "logprobs": {**full, **logprobs}}]}


def chat(**entry):
    full = {"token": "a", "logprob": -1, "top_logprobs": [{"token": "b", "logprob": -2.5}]}
    return {"choices": [{"message": {}, "logprobs": {"content": [{**full, **entry}]}}]}


def test_both_endpoints_tell_log_probabilities():
    found, body = asked(completion())
    assert found == [ScoredToken("a", -1.0, {"a": -1.0, "b": -2.5})]
    assert body["logprobs"] == 5 and body["max_tokens"] == 4 and "stream" not in body
    found, body = asked(chat(), CHAT)
    assert found == [ScoredToken("a", -1.0, {"b": -2.5})]
    assert body["logprobs"] is True and body["top_logprobs"] == 5


@pytest.mark.parametrize(
    ("answer", "endpoint", "message"),
    [
        ({}, COMPLETIONS, "sent choices None"),
        ({"choices": [1]}, COMPLETIONS, "expected one object"),
        ({"choices": [{"text": "a"}]}, COMPLETIONS, "has no list tokens"),
        ({"choices": [{"text": "a", "logprobs": 3}]}, COMPLETIONS, "logprobs is 3"),
        (completion(token_logprobs=[]), COMPLETIONS, "lists of different lengths"),
        (completion(token_logprobs=[None]), COMPLETIONS, "the token 'a' with None"),
        (completion(token_logprobs=["-1"]), COMPLETIONS, "expected a text and log probabilities"),
        (completion(top_logprobs=[{"a": float("nan")}]), COMPLETIONS, "log probabilities"),
        (completion(tokens=[5]), COMPLETIONS, "the token 5"),
        (chat(logprob=True), CHAT, "the token 'a' with True"),
        (chat(top_logprobs=None), CHAT, "has no list top_logprobs"),
        ([], COMPLETIONS, "expected an object"),
    ],
)
def test_wrong_answers_are_errors_with_their_reason(answer, endpoint, message):
    found, _ = asked(answer, endpoint)
    assert isinstance(found, str) and message in found
