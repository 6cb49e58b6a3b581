"""Texts with a response format are JSON of that schema, with the same text for every drafter."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers.serving import MODEL, alone, ids_of, serving, target, tokenizer
from jsonschema import validate

pytest.importorskip("llguidance", reason="llguidance is not installed (extra: structured)")

import specdec_ext
from specdec_ext.serve.structured import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "A box"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "box", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 2.0}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_text_fits_the_schema(server, fields, stream):
    given = dict(model=MODEL, messages=[USER], max_tokens=200, response_format=FORMAT, **fields)
    answer = server.client.chat.completions.create(stream=stream, **given)
    if stream:
        chunks = [*answer]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert reason == "stop"
    validate(json.loads(text), SCHEMA)


def test_any_object(server):
    """A bias forbids letters and quotes that would make the object long."""
    body = dict(
        prompt="x = ", max_tokens=60, temperature=0, response_format={"type": "json_object"}
    )
    bias = {str(ids_of("}")[0]): 50}
    answer = server.post("/v1/completions", logit_bias=bias, **body).json()
    assert isinstance(json.loads(answer["choices"][0]["text"]), dict)


@pytest.mark.parametrize("drafter", ["auto", "ngram", "draft"])
def test_drafts_do_not_change_the_text(drafter):
    """Drafts leave the grammar and return to it; the state of the grammar follows."""
    prompt = ids_of('{"name": "box", "size": "small", "parts": [true, false]}\n')
    grammars = Grammars(tokenizer(), 4096, [0])

    def processors():
        return [grammars.processor(SCHEMA, len(prompt))]

    sampled = dict(do_sample=True, seed=3, max_new_tokens=120)
    expected = alone(prompt, logits_processor=processors(), **sampled)
    output = specdec_ext.generate(
        target(),
        torch.tensor([prompt]),
        drafter=drafter,
        speculation="fixed",
        logits_processor=processors(),
        return_dict_in_generate=True,
        **sampled,
    )
    assert output.sequences[0, len(prompt) :].tolist() == expected
    assert output.speculation_stats.accepted_tokens > 0
    assert output.speculation_stats.accepted_tokens < output.speculation_stats.draft_tokens


def test_the_processor_depends_on_the_ids_alone():
    """After any calls, also with other texts, a text has the scores of a new processor."""
    grammars = Grammars(tokenizer(), 4096, [0])
    text = ids_of('{"name":"ab","size":"large","parts":[true]}')
    used = grammars.processor(SCHEMA, 1)
    scores = torch.zeros(1, 4096)
    for end in [3, 7, 2, len(text), 0, 5, 5, len(text) - 1]:
        ids = torch.tensor([[9, *text[:end]]])
        used(torch.tensor([[9, *text[: max(0, end - 1)], 17]]), scores)  # not in the grammar
        expected = grammars.processor(SCHEMA, 1)(ids, scores)
        assert torch.equal(used(ids, scores), expected)
        assert expected.isinf().any() and not expected.isinf().all()
        if end < len(text):
            assert not expected[0, text[end]].isinf()


@pytest.mark.parametrize(
    "schema, expected",
    [
        ({"type": "thing"}, "the schema is not supported"),
        ({"$ref": "#/nothing"}, "the schema is not supported"),
    ],
)
def test_bad_schemas(server, schema, expected):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = server.post("/v1/completions", prompt="a", response_format=form)
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "response_format"


def test_what_a_format_excludes(server, monkeypatch):
    body = dict(prompt="a", response_format={"type": "json_object"})
    answer = server.post("/v1/completions", ignore_eos=True, **body)
    assert "ignore_eos: a text with a response_format ends" in answer.text
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = server.post("/v1/completions", **body)
    assert answer.status_code == 400
    assert "response_format needs llguidance, which is not installed" in answer.text
    assert ".[structured]" in answer.text
