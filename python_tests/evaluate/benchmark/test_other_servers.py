"""The shapes in which other programs stream, as they were recorded, and how they are measured.

Recorded from llama-cpp-python 0.3.36 (``python -m llama_cpp.server``) and transformers 5.24
(``transformers serve``). Fields that are not read are left out.
"""

import pytest
from helpers.fake_server import DONE, completion, fake_server

pytest.importorskip("httpx2", reason="httpx2 is not installed (extra: serve)")

from specdec_ext.evaluate.benchmark.client import CHAT, COMPLETIONS, Server
from specdec_ext.evaluate.benchmark.prompts import Conversation, Question
from specdec_ext.evaluate.benchmark.served import compare_servers

PIECES = ("from", " typing", " import", " Any")
TEXTS = [Conversation(str(number), (f"import os  # {number}\n",)) for number in range(3)]
CHATS = [Conversation("chat", ("import os",), is_chat=True)]
QUESTION = Question("0", "", ("import os",))


@pytest.fixture
def fake():
    with fake_server() as running:
        yield running


def measured(fake, conversations=TEXTS, model=None, **options):
    with Server(fake.url, model) as server:
        (report,) = compare_servers([server], conversations, **{"max_new_tokens": 4, **options})
    (series,) = report.series.values()
    return report, series


def llama_cpp(body):
    """One token per event and no usage in streams; fields that are not known are ignored."""
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    text = {"index": 0, "logprobs": None}
    if not body.get("stream"):
        return 200, {"choices": [{"text": "".join(PIECES), **text}], "usage": usage}
    if "messages" in body:
        deltas = [{"role": "assistant"}, *({"content": piece} for piece in PIECES), {}]
        pieces = [{"delta": each, **text} for each in deltas]
    else:
        pieces = [{"text": each, **text} for each in (*PIECES, "")]
    ends = [*[None] * (len(pieces) - 1), "length"]
    return [
        *({"choices": [{**p, "finish_reason": end}]} for p, end in zip(pieces, ends, strict=True)),
        DONE,
    ]


@pytest.mark.parametrize("conversations", [TEXTS, CHATS], ids=["texts", "chats"])
def test_llama_cpp_python(fake, conversations):
    """Tokens are counted by events, because its whole answer to the first prompt agrees with them."""
    fake.models = [
        {"id": "/models/tiny.gguf", "object": "model", "owned_by": "me", "permissions": []}
    ]
    fake.answer = llama_cpp
    report, series = measured(fake, conversations, repeats=2)
    assert series.new_tokens == [4] * len(conversations)
    assert all(latency.counts for latency in series.latencies) and not series.failures
    assert (
        series.prompt_tokens == 0 and series.prompt_tokens_per_second is None
    )  # not told in streams
    assert any(
        "counts no tokens in streams; each chunk is taken" in each for each in report.remarks
    )
    asked = {"chats": 0, "texts": 0}
    for body in fake.bodies:
        asked["chats" if "messages" in body else "texts"] += 1
    assert min(asked.values()) == 0  # all in the same way


def test_chunks_of_several_tokens_are_not_taken_for_one(fake):
    """A server that speculates and counts nothing: its speed is not known."""
    usage = {"completion_tokens": 4}
    whole = 200, {"choices": [{"text": "abcd"}], "usage": usage}
    fake.answer = lambda body: [*completion("ab", "cd")[:-2], DONE] if body.get("stream") else whole
    with Server(fake.url) as server, pytest.raises(ValueError, match="the server counts no tokens"):
        server.connect(QUESTION, [COMPLETIONS])
    fake.answer = lambda body: (
        [*completion("ab", "cd")[:-2], DONE] if body.get("stream") else (500, b"no")
    )
    with Server(fake.url) as server, pytest.raises(ValueError, match="the server counts no tokens"):
        server.connect(QUESTION, [COMPLETIONS])


def test_a_server_that_breaks_in_a_stream(fake):
    """A prompt beyond llama.cpp's context: status 200 and no event."""
    fake.answer = lambda body: [] if "# 2" in body["prompt"] else completion(*PIECES)
    report, series = measured(fake, repeats=1)
    assert series.failures == [
        "the server sent no text; its log may say why, such as a prompt beyond its context"
    ]
    assert "1 of 3 prompts are left out of all ratios" in "\n".join(report.remarks)


def transformers_serve(body):
    """The usage is in the last choice, there is no [DONE], and fields that are not known are refused."""
    unknown = body.keys() & {"cache_salt", "ignore_eos"}
    if unknown:
        return 422, {"detail": f"Unexpected fields in the request: {unknown}"}
    if "messages" in body:  # the model has no chat template
        return 500, b"Internal Server Error"
    events = [{"choices": [{"index": 0, "text": piece}]} for piece in PIECES]
    last = {"finish_reason": "length", "index": 0, "text": ""}
    return [
        *events,
        {"choices": [last], "usage": {"completion_tokens": 4, "prompt_tokens": 3}},
    ]


def test_transformers_serve(fake):
    """It can't list its models without a cache of the hub, and closes connections after errors."""
    fake.models = 500, b"Internal Server Error"
    fake.answer = transformers_serve
    report, series = measured(fake, CHATS, model="/models/tiny", repeats=1)
    assert series.new_tokens == [4] and series.prompt_tokens == 3
    assert sum(series.latencies[0].counts) == 4  # one per event, some of which arrive together
    assert "requests are completions" in report.remarks
    assert any("refuses ignore_eos" in each for each in report.remarks)
    with (
        Server(fake.url) as server,
        pytest.raises(ValueError, match="models: status 500: Internal Server Error"),
    ):
        server.connect(QUESTION, [CHAT])


def test_a_connection_that_was_closed_since_is_replaced(fake):
    """The request was not read, so it is no failure of the server."""
    fake.keeps = False
    fake.answer = lambda body: completion(*PIECES)
    _, series = measured(fake, repeats=2)
    assert not series.failures and series.requests == 6
    assert len(fake.bodies) == 8  # with those of connect and of the warm-up


def test_a_new_connection_that_is_closed_is_a_failure(fake):
    fake.answer = lambda body: None
    with Server(fake.url) as server:
        (reply,) = server.ask_all([QUESTION], 1)
    assert "RemoteProtocolError" in reply.error and len(fake.bodies) == 1
