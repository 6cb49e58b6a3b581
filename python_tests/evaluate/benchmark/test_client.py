"""Streams of a server at known times, servers that refuse fields, and wrong answers with their reasons."""

import threading
import time

import pytest
from helpers.fake_server import DONE, completion, fake_server

pytest.importorskip("httpx2", reason="httpx2 is not installed (extra: serve)")

from specdec_ext.evaluate.benchmark import client
from specdec_ext.evaluate.benchmark.client import CHAT, COMPLETIONS, OPTIONAL, Server
from specdec_ext.evaluate.benchmark.prompts import Question
from specdec_ext.evaluate.benchmark.reply import Reply

QUESTION = Question("0", "", ("import os",))


@pytest.fixture
def fake():
    with fake_server() as running:
        yield running


def reply_of(events, times, began=10.0):
    """The reply to a stream whose events arrive at these times."""
    reply = Reply(began)
    for at, event in zip(times, events, strict=False):
        if isinstance(event, dict):
            reply.add(at, event)
    return reply


# --- arrivals ---------------------------------------------------------------------------------------


def test_a_chunk_of_three_tokens():
    events = completion("a", "bcd", "e", tokens=[1, 3, 1])
    found = reply_of(events, (10.5, 11.1, 11.3, 11.4, 11.4))
    assert (found.text, found.tokens, found.prompt_tokens) == ("abcde", 5, 5)
    assert found.arrivals == [(10.5, 1), (11.1, 3), (11.3, 1)]
    assert found.latency.first == pytest.approx(0.5)
    assert found.latency.between_tokens == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert found.latency.gaps == pytest.approx((0.6, 0.2))


def test_events_that_are_read_together_are_one_arrival():
    events = completion("a", "b", "c", tokens=[1, 1, 2])
    found = reply_of(events, (10.5, 11.1, 11.1, 11.2, 11.2))
    assert found.arrivals == [(10.5, 1), (11.1, 3)] and found.latency.counts == (1, 3)


def test_text_that_was_held_back_arrives_with_its_tokens():
    """A token without text, such as half a character, is an arrival; its text later is none."""
    events = completion("a", "", "bc", "d", tokens=[1, 1, 1, 0])
    found = reply_of(events, (11.0, 12.0, 13.0, 14.0, 15.0, 16.0))
    assert found.arrivals == [(11.0, 1), (12.0, 1), (13.0, 1)] and found.text == "abcd"


def test_usage_at_the_end_alone():
    """If events and tokens agree in number, each event is a token; else ITL is not known, and TPOT is."""
    times = (11.0, 12.0, 14.0, 14.0, 14.0)
    for total, counts in ((3, (1, 1, 1)), (4, (1, 1, 1)), (7, ())):
        found = reply_of(completion("a", "b", "c", total=total), times)
        assert found.tokens == total and found.latency.counts == counts
    assert found.latency.per_token == pytest.approx(3 / 6) and found.latency.first == 1.0


def test_usage_beside_the_last_choice_is_no_chunk():
    events = [
        {"choices": [{"text": "a", "finish_reason": None}]},
        {"choices": [{"text": "b", "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 9}},
    ]
    found = reply_of(events, (11.0, 12.0, 13.0))
    assert found.arrivals == [(11.0, 0), (12.0, 0)] and found.latency.counts == ()


def test_reasoning_of_a_chat_is_text():
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "why"}, {"content": "so"}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    found = reply_of([*events, {"choices": [], "usage": {"completion_tokens": 2}}], range(11, 15))
    assert found.text == "whyso" and found.arrivals == [(12, 0), (13, 0)]


def test_kept_prompt_tokens_are_not_read():
    usage = {
        "prompt_tokens": 50,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 48},
    }
    found = reply_of([{"choices": [{"text": "a"}], "usage": usage}], (11.0,))
    assert found.cached_tokens == 48 and found.latency.prompt_tokens == 2


def test_statistics_of_a_request():
    told = {
        "acceptance_histogram": [
            1,
            0,
            2,
            0,
        ],  # of three drafts, two had exactly two accepted tokens
        "num_spec_steps": 3,
        "num_draft_tokens": 9,
        "num_accepted_draft_tokens": 4,
    }
    events = completion("a", metrics={"speculative_decoding": told})
    stats = reply_of(events, range(11, 20)).stats
    assert stats.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.accepted_per_position == [2, 2] and stats.draft_tokens == 9
    assert stats.reached_per_position == []
    told["reached_per_position"] = [3, 2, 1]  # one of the two had no third token
    stats = reply_of(completion("a", metrics={"speculative_decoding": told}), range(11, 20)).stats
    assert stats.accepted_per_position == [2, 2, 0]
    assert stats.conditional_acceptance == [2 / 3, 1.0, 0.0]


@pytest.mark.parametrize(
    "event, message",
    [
        ({"error": {"message": "out of memory"}}, "the server reports: out of memory"),
        ({"choices": 3}, "the server sent choices 3; expected a list of objects"),
        ({"choices": [3]}, "expected a list of objects"),
        ({"choices": [{"text": 3}]}, "the server's choice: text is 3; expected a string"),
        ({"choices": [{"delta": 3}]}, "delta is 3; expected an object"),
        ({"choices": [], "usage": {"completion_tokens": -1}}, "completion_tokens is -1; expected"),
        (
            {"choices": [], "usage": {"completion_tokens": "1"}},
            "completion_tokens is '1'; expected",
        ),
        ({"choices": [], "usage": {"completion_tokens": 1}}, "the server counts 1 tokens after 2"),
        ({"metrics": {"speculative_decoding": {"acceptance_histogram": [-1]}}}, "expected counts"),
        ({"metrics": {"speculative_decoding": {"num_spec_steps": 1.5}}}, "num_spec_steps is 1.5"),
        (
            {"metrics": {"speculative_decoding": {"reached_per_position": [2]}}},
            r"reached_per_position is \[2\] for .* of 0 drafts; expected counts that agree",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_wrong_events(event, message):
    reply = Reply(0.0, tokens=2)
    with pytest.raises(ValueError, match=message):
        reply.add(1.0, event)


# --- connecting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://a:b", "http://[::1"]
)
def test_bad_addresses(url):
    with pytest.raises(ValueError, match=r"--url .*expected an address such as http://127.0.0.1"):
        Server(url)


def test_a_server_that_is_not_there():
    with (
        Server("http://127.0.0.1:1") as server,
        pytest.raises(
            ValueError,
            match=r"--url \S+: no answer from \S+/v1/models: ConnectError",
        ),
    ):
        server.connect(QUESTION, [COMPLETIONS])


@pytest.mark.parametrize(
    "models, asked, message",
    [
        ([], None, r"serves 0 models \(none\); pass one as MODEL"),
        ([{"id": "a"}, {"id": "b"}], None, r"serves 2 models \(a, b\); pass one as MODEL"),
        ([{"id": "a"}], "c", "serves no model c; it serves a"),
        ([{"name": "a"}], None, "expected a list of models"),
        ({"a": 1}, None, "expected a list of models"),
    ],
    ids=["none", "two", "another", "no id", "no list"],
)
def test_the_model_must_be_clear(fake, models, asked, message):
    fake.models = models
    with Server(fake.url, asked) as server, pytest.raises(ValueError, match=message):
        server.connect(QUESTION, [COMPLETIONS])


def test_a_server_that_takes_everything(fake):
    fake.models = [{"id": "a"}, {"id": "b", "owned_by": "specdec_ext"}]
    with Server(f"{fake.url}/v1/", "b", "secret") as server:
        server.connect(QUESTION, [CHAT, COMPLETIONS])
        assert (server.endpoint, server.fields, server.is_ours) == (CHAT, list(OPTIONAL), True)
    (body,) = fake.bodies
    assert body["path"] == "/v1/chat/completions" and body["key"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": "import os"}]
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["model"] == "b" and body["ignore_eos"] is True and "prompt" not in body


def test_fields_that_are_refused_are_left_out(fake):
    """By name, or one after the other if the server does not say which one it is."""

    def answer(body):
        for name in ("ignore_eos", "seed"):
            if name in body:
                wrong = f"unknown field {name}" if name == "ignore_eos" else "something is wrong"
                return 400, {"error": {"message": wrong}}
        return completion("a")

    fake.answer = answer
    with Server(fake.url) as server:
        server.connect(QUESTION, [COMPLETIONS])
        assert server.fields == ["continuous_usage_stats"]  # cache_salt went before seed
        server.ask_all([QUESTION], 1, max_tokens=3)
    assert "ignore_eos" not in fake.bodies[-1] and "seed" not in fake.bodies[-1]


def test_completions_are_asked_where_chats_are_refused(fake):
    no_template = (400, {"error": {"message": "no chat template"}})
    fake.answer = lambda body: no_template if "messages" in body else completion("a")
    with Server(fake.url) as server:
        server.connect(QUESTION, [CHAT, COMPLETIONS])
        assert server.endpoint == COMPLETIONS and server.fields == list(OPTIONAL)
        assert fake.bodies[-1]["prompt"] == "import os"
        with pytest.raises(ValueError, match="chat/completions: status 400: no chat template"):
            server.connect(QUESTION, [CHAT])


def test_a_wrong_key_is_told_at_once(fake):
    fake.answer = lambda body: (401, {"error": {"message": "wrong key"}})
    with Server(fake.url) as server:
        with pytest.raises(ValueError, match="status 401: wrong key"):
            server.connect(QUESTION, [CHAT, COMPLETIONS])
        assert len(fake.bodies) == 1


# --- requests that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, error",
    [
        ((500, {"error": {"message": "it broke"}}), "status 500: it broke"),
        ((503, b"<html>\x1b[2J"), r"status 503: <html>\\x1b[2J"),
        ((422, {"detail": [{"loc": 1}]}), "status 422: [{'loc': 1}]"),
        (completion("a")[:1], "the stream ended before the text did"),
        ([{"error": "gone"}], "the server reports: gone"),
        ([b"data: {\n\n"], "the server sent no valid JSON"),
        ([b"data: 3\n\n"], "the server sent 3; expected an object"),
        ([DONE], "the server sent no text"),
        ([{"choices": [{"text": "a"}]}, DONE], "the server counts no tokens"),
        ([b"data: " + b"x" * 2000], "an event of the stream is longer than 1000 bytes"),
        ((500, b"x" * 2000), "the server's answer is longer than 1000 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_answers_are_failed_requests(fake, answer, error, monkeypatch):
    monkeypatch.setattr(client, "MAX_BYTES", 1000)
    fake.answer = lambda body: answer
    with Server(fake.url) as server:
        (reply,) = server.ask_all([QUESTION], 1)
    assert error.replace("\\\\", "\\") in reply.error


def test_a_request_that_takes_too_long_fails_and_others_do_not(fake):
    ended = threading.Event()

    def answer(body):
        if body["prompt"] == "slow":
            assert ended.wait(60)
        return completion("a")

    fake.answer = answer
    with Server(fake.url, timeout=1) as server:
        slow, fast = server.ask_all([Question("1", "", ("slow",)), QUESTION], 2)
        ended.set()
    assert slow.error == "no complete answer within 1 seconds" or "Timeout" in slow.error
    assert not fast.error and fast.text == "a"


# --- streams and counters ---------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 3])
def test_as_many_requests_as_streams_run_at_a_time(fake, streams):
    def answer(body):
        end = time.monotonic() + 5
        # The first ones wait until as many are there as may be.
        while fake.most_at_once < streams and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.03)  # all that may come meanwhile come
        return completion(body["prompt"])

    fake.answer = answer
    asked = [Question("", "", (f"p{number}",)) for number in range(7)]
    with Server(fake.url) as server:
        replies = server.ask_all(asked, streams, max_tokens=9)
    assert [reply.text for reply in replies] == [f"p{number}" for number in range(7)]
    assert fake.most_at_once == streams and len(fake.bodies) == 7
    assert {body["max_tokens"] for body in fake.bodies} == {9}
    assert sorted(body["seed"] for body in fake.bodies) == list(range(7))
    assert len({body["cache_salt"] for body in fake.bodies}) == 7


def test_a_text_may_be_left_to_end_by_itself(fake):
    with Server(fake.url) as server:
        server.ask_all([QUESTION], 1, ends=True)
    assert fake.bodies[-1]["ignore_eos"] is False


METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 10
vllm:spec_decode_num_drafts_total{engine="1"} 5
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 45
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 18
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 12
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6
"""


def test_counters_of_vllm(fake):
    with Server(fake.url) as server:
        assert server.counters() is None
        fake.metrics = METRICS
        found = server.counters()
        assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (15, 45, 18)
        assert found.accepted_per_position == [12, 6]
        for wrong in ("# TYPE a counter\na_total 1\n", "{{{", METRICS.replace('"1"} 6', '"x"} 6')):
            fake.metrics = wrong
            assert server.counters() is None
