"""Every bad request is refused in OpenAI's format, with the field, what was expected and what was given."""

from __future__ import annotations

import logging

import pytest
from helpers.serving import (
    MODEL,
    PROMPT,
    held_steps,
    ids_of,
    openai,
    record_handles,
    serving,
    text_alone,
    until,
)

from specdec_ext.serve.http import schemas

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def refused(answer, status=400):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    return body["error"]


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("temperature", -1, "greater than or equal to 0, got -1"),
        ("temperature", "1", "valid number, got '1'"),
        ("temperature", 0.001, "at least 0.01, got 0.001"),
        ("top_p", 0, "greater than 0, got 0"),
        ("top_p", 1.1, "less than or equal to 1, got 1.1"),
        ("top_k", 1.5, "valid integer, got 1.5"),
        ("top_k", -2, "got -2"),
        ("min_p", 2, "got 2"),
        ("repetition_penalty", 0, "got 0"),
        ("repetition_penalty", 1e-300, "got 1e-300"),
        ("presence_penalty", 3, "got 3"),
        ("frequency_penalty", -3, "got -3"),
        ("logit_bias", {"x": 1}, "expected token ids as names, got {'x': 1}"),
        ("logit_bias", {"4096": 1}, "in [0, 4096), got 4096"),
        ("seed", 2**63, "got 9223372036854775808"),
        ("seed", True, "got True"),
        ("n", 0, "got 0"),
        ("n", 129, "got 129"),
        ("max_tokens", 0, "got 0"),
        ("max_tokens", -1, "got -1"),
        ("min_tokens", 17, "at most 16 (max_tokens), got 17"),
        ("stream", "yes", "valid boolean, got 'yes'"),
        ("ignore_eos", 1, "got 1"),
        ("speculation", "always", "'auto', 'fixed' or 'none', got 'always'"),
        ("response_format", {"type": "xml"}, "'json_schema', got 'xml'"),
        ("echo", True, "the prompt can't be returned"),
        ("suffix", "x", "leave it out, got 'x'"),
        ("logprobs", 21, "got 21"),
        ("prompt", [], "at least 1 item"),
        ("prompt", "", "not empty, got ''"),
        ("prompt", [[]], "not empty, got []"),
        ("prompt", [1, "a"], "not empty, got 1"),
        ("prompt", [-1], "got [-1]"),
        ("prompt", [4096], "in [0, 4096), got 4096"),
        ("prompt", {"a": 1}, "valid list"),
        ("prompt", 5, "valid list, got 5"),
    ],
)
def test_fields_of_completions(server, field, value, expected):
    error = refused(server.post(TEXT, **{"prompt": PROMPT, "max_tokens": 16, field: value}))
    assert expected in error["message"] and error["message"].startswith(field)
    assert error["param"].split(".")[0] == field
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("messages", [], "at least 1 item"),
        ("messages", [{**USER, "role": "robot"}], "got 'robot'"),
        ("messages", [{"role": "user"}], "content is required"),
        ("messages", [{**USER, "tool_calls": [{"function": {"name": "f"}}]}], "'assistant'"),
        ("messages", [{**USER, "mood": 1}], "messages.0.mood: this field is not known"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content.0: only parts of type 'text' are supported, got 'image_url'",
        ),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "has the field 'text'"),
        ("messages", [{"role": "user", "content": "refuse"}], "no such message"),
        (
            "messages",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments: expected JSON",
        ),
        ("tool_choice", "required", "calls of a tool can't be forced"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "can't be forced"),
        ("parallel_tool_calls", False, "got False"),
        ("top_logprobs", 2, "top_logprobs needs logprobs=true"),
        ("chat_template_kwargs", {"tokenize": True}, "tokenize is chosen by the server"),
        ("tools", [{"type": "function", "function": {}}], "tools.0.function.name: this field is"),
    ],
)
def test_fields_of_chats(server, field, value, expected):
    error = refused(server.post(CHAT, **{"messages": [USER], "max_tokens": 4, field: value}))
    assert expected in error["message"]


def test_fields_that_exclude_each_other(server):
    for path, given in ((CHAT, dict(messages=[USER])), (TEXT, dict(prompt=PROMPT))):
        same = server.post(path, max_tokens=4, max_completion_tokens=4, ignore_eos=True, **given)
        assert same.json()["usage"]["completion_tokens"] == 4
        both = server.post(path, max_tokens=4, max_completion_tokens=5, **given)
        assert "mean the same; pass one" in refused(both)["message"]
    options = dict(prompt=PROMPT, stream_options={"include_usage": True})
    assert "stream=true only" in refused(server.post(TEXT, **options))["message"]
    assert "not ranked" in refused(server.post(TEXT, prompt=PROMPT, best_of=3))["message"]
    form = {"type": "json_schema"}
    assert (
        "json_schema is required"
        in refused(server.post(TEXT, prompt=PROMPT, response_format=form))["message"]
    )
    assert "either prompt or messages" in refused(server.post("/tokenize"))["message"]


def test_unknown_fields_are_refused_by_name_and_harmless_ones_are_not(server):
    error = refused(server.post(TEXT, prompt=PROMPT, tempreature=1))
    assert error["message"].startswith("tempreature: this field is not known")
    assert (error["param"], error["code"]) == ("tempreature", "unknown_field")
    harmless = {name: "x" for name in schemas.HARMLESS}
    assert server.post(TEXT, prompt=PROMPT, max_tokens=1, **harmless).status_code == 200
    error = refused(server.post(TEXT, max_tokens=1))
    assert (error["param"], error["code"]) == ("prompt", "missing_field")


@pytest.mark.parametrize(
    "body, status, expected",
    [
        (b"{", 400, "not valid JSON"),
        (b"\xff", 400, ""),
        (b"[" * 100_000, 400, ""),
        (b"[]", 400, "valid dictionary"),
        (b"null", 400, ""),
        (b"", 400, ""),
        (b'{"prompt": "\\ud800"}', 400, "prompt"),
        (b'{"\\ud800": 1, "prompt": "a"}', 400, "unicode string, got '\\ud800'"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        (b'{"prompt": "a", "temperature": Infinity}', 400, "temperature"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, ""),
    ],
)
def test_broken_bodies(server, body, status, expected):
    headers = {"content-type": "application/json"}
    answer = server.http.post(TEXT, content=body, headers=headers)
    assert expected in refused(answer, status)["message"]


def test_broken_text_in_messages(server):
    body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "\\ud800"}]}'
    refused(server.http.post(CHAT, content=body, headers={"content-type": "application/json"}))
    tools = b'"tools": [{"type": "function", "function": {"name": "f", "description": "\\ud800"}}]'
    body = b'{"messages": [{"role": "user", "content": "a"}], ' + tools + b"}"
    refused(server.http.post(CHAT, content=body, headers={"content-type": "application/json"}))


def test_paths_methods_and_models(server):
    assert refused(server.http.get("/v2"), 404)["message"] == "GET /v2: Not Found"
    assert refused(server.http.get(TEXT), 405)["message"].startswith("GET /v1/completions: Method")
    error = refused(server.post(TEXT, prompt="a", model="gpt-4"), 404)
    assert error["message"] == f"model: this server has the model '{MODEL}', got 'gpt-4'"
    assert error["code"] == "model_not_found"


def test_the_context_of_the_model_is_the_limit(server):
    long = [1] * 500
    error = refused(server.post(TEXT, prompt=long, max_tokens=13))
    assert error["code"] == "context_length_exceeded"
    assert "may have 512 tokens; the prompt has 500, and 13 more were asked for" in error["message"]
    assert refused(server.post(TEXT, prompt=[1] * 512, max_tokens=1))["param"] == "prompt"
    assert refused(server.post(TEXT, prompt=[1], max_tokens=10**30))["code"] == error["code"]
    assert refused(server.post(CHAT, messages=[{**USER, "content": "a b c " * 400}]))
    # A chat without a limit fills the context.
    messages = [{**USER, "content": "a = 1 " * 80}]
    prompt = server.post("/tokenize", messages=messages).json()["count"]
    answer = server.post(CHAT, messages=messages, ignore_eos=True, temperature=0).json()
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 512 - prompt,
        "total_tokens": 512,
        "prompt_tokens_details": answer["usage"]["prompt_tokens_details"],
    }


def test_limits_of_the_server():
    limits = dict(max_body_bytes=400, api_key="sésame")
    with serving({"max_length": 40}, **limits) as server:
        url = f"{server.url}{TEXT}"
        body = {"prompt": [1] * 30, "max_tokens": 11}
        error = refused(server.http.post(url, json=body), 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for wrong in ("Bearer sesame", "Bearer", "sésame", "Basic sésame"):
            headers = {"authorization": wrong.encode()}
            refused(server.http.get("/v1/models", headers=headers), 401)
        right = {"authorization": "Bearer sésame".encode()}
        assert server.http.get("/v1/models", headers=right).status_code == 200
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/metrics").status_code == 200
        error = refused(server.http.post(url, json=body, headers=right))
        assert "may have 40 tokens" in error["message"]
        large = {"prompt": "x" * 500}
        error = refused(server.http.post(url, json=large, headers=right), 413)
        assert "expected at most 400" in error["message"]
        chunked = server.http.post(
            url, content=iter([b"{" + b" " * 300, b" " * 300]), headers=right
        )
        assert refused(chunked, 413)["code"] == "body_too_large"


def test_a_full_queue_is_429_with_retry_after():
    with serving(engine_options=dict(max_waiting=0, max_rows=1), request_timeout=30) as server:
        long = dict(model=MODEL, prompt=PROMPT, max_tokens=400, temperature=0)
        with held_steps(), server.client.completions.create(stream=True, **long) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                server.client.completions.create(**long)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.body["code"] == "engine_full"
        until(lambda: server.engine.load.running == 0)
        assert server.post(TEXT, prompt=PROMPT, max_tokens=1).status_code == 200


def test_n_choices_that_do_not_all_fit_leave_nothing_behind(monkeypatch):
    with serving(engine_options=dict(max_waiting=1, max_rows=1)) as server:
        handles = record_handles(server.engine, monkeypatch)
        with held_steps():
            refused(server.post(TEXT, prompt=PROMPT, n=5, max_tokens=200), 429)
        assert handles and all(handle.is_cancelled for handle in handles)
        until(lambda: server.engine.load.running + server.engine.load.waiting == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_timeout(stream):
    with serving(request_timeout=0.3) as server:
        given = dict(model=MODEL, prompt=PROMPT, max_tokens=450, temperature=0)
        with held_steps():
            if not stream:
                error = refused(server.post(TEXT, **given), 504)
                assert error["type"] == "server_error"
            else:
                with pytest.raises(openai.APIError) as caught:
                    [*server.client.completions.create(stream=True, **given)]
                error = caught.value.body
        assert "not complete after 0.3 seconds" in error["message"]
        assert error["code"] == "request_timeout"
        until(lambda: server.engine.load.running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_exception_of_one_request_disturbs_no_other(server, monkeypatch, caplog, stream):
    from specdec_ext.verify.penalties import OccurrencePenalties

    def broken(self, input_ids, scores):
        raise RuntimeError("broken penalty")

    expected = text_alone(PROMPT, max_new_tokens=8, do_sample=False)
    given = dict(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    monkeypatch.setattr(OccurrencePenalties, "__call__", broken)
    with caplog.at_level(logging.ERROR, "specdec_ext"):
        if stream:
            with pytest.raises(openai.APIError, match="broken penalty"):
                [*server.client.completions.create(stream=True, presence_penalty=1, **given)]
        else:
            error = refused(server.post(TEXT, presence_penalty=1, **given), 500)
            assert (error["type"], "broken penalty" in error["message"]) == ("server_error", True)
        until(
            lambda: any(
                "broken penalty" in str(vars(each).get("fields")) for each in caplog.records
            )
        )
    assert server.client.completions.create(**given).choices[0].text == expected


def test_a_model_without_a_chat_template():
    with serving(chat_template=None) as server:
        error = refused(server.post(CHAT, messages=[USER]))
        assert error["code"] == "no_chat_template" and "--chat-template" in error["message"]
        assert server.post(TEXT, prompt=ids_of("a"), max_tokens=1).status_code == 200
