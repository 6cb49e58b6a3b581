"""Tool calls and reasoning: what the template reads, and what transformers parses from a text.

The bundled model writes Python, so a model that recites a text stands for one that calls tools.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from helpers.serving import MODEL, TEMPLATE, ids_of, serving, target, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_ext.serve.text.replies import Reply, response_template

pytest.importorskip(
    "transformers.utils.chat_parsing", reason="this transformers does not parse replies"
)

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
USER = {"role": "user", "content": "Add"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def qwen():
    """A template of transformers for a widespread form."""
    config = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
    return response_template(config, tokenizer())


def parsed(pieces, template=None, tools=(TOOL,)):
    """The message that the pieces make, and its calls."""
    reply = Reply(tokenizer(), qwen() if template is None else template, ids_of("a"), list(tools))
    message, calls = {"content": "", "reasoning_content": ""}, []
    for delta in [*(each for piece in pieces for each in reply.feed(piece)), *reply.flush()]:
        calls += delta.pop("tool_calls", [])
        for name, text in delta.items():
            message[name] += text
    return message, calls, reply


@given(st.lists(st.integers(0, 200), max_size=8))
@settings(deadline=None)
def test_a_reply_has_the_same_parts_however_it_is_divided(places):
    text = f"<think>\nHm\n</think>\n\nSure.\n{CALL}\n{CALL}"
    places = sorted(min(place, len(text)) for place in places)
    pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    message, calls, reply = parsed(pieces)
    assert message["reasoning_content"].strip() == "Hm"
    assert message["content"].strip() == "Sure."
    assert "tool_call" not in message["content"]
    assert [call["function"]["name"] for call in calls] == ["add", "add"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}] * 2
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert reply.has_called


def test_a_broken_call_stays_text():
    broken = '<tool_call>\n{"name": "add", \n</tool_call>'
    message, calls, reply = parsed(["Sure.", broken[:20], broken[20:], " Done."])
    assert not calls and not reply.has_called
    assert message["content"].startswith("Sure.") and '{"name": "add"' in message["content"]
    assert message["content"].endswith("Done.")


def test_without_a_template_all_is_content():
    reply = Reply(tokenizer(), None, ids_of("a"), [TOOL])
    assert reply.feed(CALL) == [{"content": CALL}] and reply.flush() == []
    assert response_template(target(), tokenizer()) is None


@pytest.fixture
def reciting(monkeypatch):
    """A server whose replies are texts that a test chooses, and whose tokenizer knows a template."""
    from transformers import LogitsProcessor

    from specdec_ext.serve import sampling

    class Recite(LogitsProcessor):
        def __init__(self, text, columns):
            self.ids, self.columns = [*ids_of(text), 0], columns

        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, self.ids[input_ids.shape[1] - self.columns]] += 1000
            return scores

    chosen = {}
    plain = sampling._processors
    monkeypatch.setattr(
        sampling,
        "_processors",
        lambda service, body, columns: [
            *(plain(service, body, columns) or []),
            Recite(chosen["text"], columns),
        ],
    )
    monkeypatch.setattr(tokenizer(), "response_template", qwen(), raising=False)
    with serving(chat_template=f"{TEMPLATE}<|im_start|>assistant\n") as server:
        yield server, lambda text: chosen.update(text=text)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_reach_the_client(reciting, stream):
    server, recite = reciting
    recite(f"<think>\nHm\n</think>\n\nSure.\n{CALL}")
    request = dict(model=MODEL, messages=[USER], tools=[TOOL], temperature=0, max_tokens=100)
    if not stream:
        answer = server.client.chat.completions.create(**request)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert choice.message.content.strip() == "Sure."
        assert choice.message.reasoning_content.strip() == "Hm"
        assert choice.finish_reason == "tool_calls"
        # The client sends the message back as it is.
        recite("Two.")
        history = [
            USER,
            choice.message.model_dump(),
            {"role": "tool", "content": "2", "tool_call_id": call.id},
        ]
        again = server.client.chat.completions.create(**{**request, "messages": history})
        assert again.choices[0].message.content == "Two."
        assert again.choices[0].finish_reason == "stop"
        return
    content, reasoning, calls, reasons = "", "", [], []
    for chunk in server.client.chat.completions.create(stream=True, **request):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        calls += choice.delta.tool_calls or []
        reasons.append(choice.finish_reason)
    assert (content.strip(), reasoning.strip(), reasons[-1]) == ("Sure.", "Hm", "tool_calls")
    (call,) = calls
    assert (call.index, call.type, call.function.name) == (0, "function", "add")


def test_a_stop_string_ends_a_reply_before_a_call(reciting):
    server, recite = reciting
    recite(f"Sure. {CALL}")
    answer = server.client.chat.completions.create(
        model=MODEL,
        messages=[USER],
        tools=[TOOL],
        temperature=0,
        max_tokens=100,
        stop="<tool_call>",
    )
    assert answer.choices[0].message.content.strip() == "Sure."
    assert answer.choices[0].finish_reason == "stop"


def test_the_template_reads_the_tools():
    with serving() as server:
        body = dict(messages=[USER], tools=[TOOL], max_tokens=1)
        described = server.post("/v1/chat/completions", **body).json()["usage"]["prompt_tokens"]
        plain = server.post("/v1/chat/completions", tool_choice="none", **body)
        assert plain.json()["usage"]["prompt_tokens"] == len(ids_of("# user: Add\n"))
        listed = server.post("/tokenize", messages=[USER], tools=[TOOL]).json()
        assert listed["count"] == described
        assert '"name": "add"' in tokenizer().decode(listed["tokens"])
