"""Texts of the server are those of ``specdec_ext.generate``, for every field, whole and as a stream."""

from __future__ import annotations

import asyncio
import copy
import json
from itertools import zip_longest

import pytest
from helpers.serving import (
    MODEL,
    PROMPT,
    TEMPLATE,
    alone,
    ids_of,
    serving,
    target,
    text_alone,
    tokenizer,
)

from specdec_ext.verify.penalties import OccurrencePenalties

TOKENS = 24
GREEDY = dict(do_sample=False)
# What OpenAI's API defines for a request without fields, in the words of transformers.
SAMPLED = dict(do_sample=True, seed=5, temperature=1.0, top_k=0, top_p=1.0)
COLUMNS = len(ids_of(PROMPT))
FIRST = alone(ids_of(PROMPT), max_new_tokens=1, do_sample=False)[0]

# Fields of the request, arguments of generate.
CASES = {
    "greedy": (dict(temperature=0), GREEDY),
    "seed": (dict(seed=5), SAMPLED),
    "negative seed": (dict(seed=-(2**63)), {**SAMPLED, "seed": -(2**63)}),
    "temperature": (dict(seed=5, temperature=0.6), {**SAMPLED, "temperature": 0.6}),
    "top_p": (dict(seed=5, top_p=0.5), {**SAMPLED, "top_p": 0.5}),
    "top_k": (dict(seed=5, top_k=3), {**SAMPLED, "top_k": 3}),
    "top_k off": (dict(seed=5, top_k=-1), SAMPLED),
    "min_p": (dict(seed=5, min_p=0.2), {**SAMPLED, "min_p": 0.2}),
    "repetition": (
        dict(temperature=0, repetition_penalty=1.5),
        {**GREEDY, "repetition_penalty": 1.5},
    ),
    "penalties": (
        dict(temperature=0, presence_penalty=1.5, frequency_penalty=0.5),
        {**GREEDY, "logits_processor": lambda: [OccurrencePenalties(1.5, 0.5, COLUMNS)]},
    ),
    "logit_bias": (
        dict(temperature=0, logit_bias={str(FIRST): -100}),
        {**GREEDY, "sequence_bias": [[[FIRST], -100.0]]},
    ),
    "nothing drafted": (dict(temperature=0, speculation="none"), GREEDY),
    "always drafted": (dict(seed=5, speculation="fixed"), SAMPLED),
    "harmless": (dict(temperature=0, user="me", store=True, metadata={"a": "b"}), GREEDY),
    "null": (dict(temperature=0, stop=None, seed=None, logit_bias=None), GREEDY),
}


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def streamed(server, path, **body):
    """(text, finish reason) of a stream."""
    text, reasons = "", []
    with server.http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        reasons.append(choice["finish_reason"])
    assert set(reasons[:-1]) <= {None}
    return text, reasons[-1]


@pytest.mark.parametrize("case", CASES)
def test_completion(server, case):
    fields, arguments = CASES[case]
    if callable(arguments.get("logits_processor")):
        arguments = {**arguments, "logits_processor": arguments["logits_processor"]()}
    expected = text_alone(PROMPT, max_new_tokens=TOKENS, **arguments)
    body = dict(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, **fields)
    answer = server.post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected, "length")
    assert streamed(server, "/v1/completions", **body) == (expected, "length")


@pytest.mark.parametrize("case", ["greedy", "seed", "penalties"])
def test_chat(server, case):
    fields, arguments = CASES[case]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}],
        },
        {"role": "assistant", "content": "Three"},
        {"role": "user", "content": "Four"},
    ]
    prompt = "# system: Be brief.\n# user: One\ntwo\n# assistant: Three\n# user: Four\n"
    if callable(arguments.get("logits_processor")):
        penalties = [OccurrencePenalties(1.5, 0.5, len(ids_of(prompt)))]
        arguments = {**arguments, "logits_processor": penalties}
    expected = text_alone(prompt, max_new_tokens=TOKENS, **arguments)
    body = dict(model=MODEL, messages=messages, **fields)
    answer = server.post("/v1/chat/completions", max_completion_tokens=TOKENS, **body)
    (choice,) = answer.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected}
    assert choice["finish_reason"] == "length"
    assert streamed(server, "/v1/chat/completions", max_tokens=TOKENS, **body) == (
        expected,
        "length",
    )


def test_clients_of_openai(server):
    """The package's own client, whole and as a stream, at once and asynchronously."""
    expected = text_alone(PROMPT, max_new_tokens=TOKENS, do_sample=False)
    given = dict(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    whole = server.client.completions.create(**given)
    assert whole.choices[0].text == expected
    assert whole.usage.completion_tokens == TOKENS
    assert whole.usage.prompt_tokens == COLUMNS
    assert whole.usage.total_tokens == COLUMNS + TOKENS
    chunks = [*server.client.completions.create(stream=True, **given)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert len({chunk.id for chunk in chunks}) == 1

    async def asynchronously():
        async with server.asynchronous() as client:
            stream = await client.completions.create(stream=True, **given)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            again = await client.completions.create(**given)
            return text, again.choices[0].text

    assert asyncio.run(asynchronously()) == (expected, expected)


def test_chat_clients_of_openai(server):
    messages = [{"role": "user", "content": "Add two numbers."}]
    prompt = "# user: Add two numbers.\n"
    expected = text_alone(prompt, max_new_tokens=TOKENS, do_sample=False)
    given = dict(model=MODEL, messages=messages, max_tokens=TOKENS, temperature=0)
    whole = server.client.chat.completions.create(**given)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    chunks = [*server.client.chat.completions.create(stream=True, **given)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.choices[0].delta.role for chunk in chunks[1:]} == {None}

    async def asynchronously():
        async with server.asynchronous() as client:
            stream = await client.chat.completions.create(stream=True, **given)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(asynchronously()) == expected


def test_prompts_are_texts_lists_and_ids(server):
    texts = [PROMPT, "class A:\n"]
    expected = [text_alone(text, max_new_tokens=8, do_sample=False) for text in texts]
    given = dict(model=MODEL, max_tokens=8, temperature=0)
    for prompt in (texts, [ids_of(text) for text in texts]):
        answer = server.client.completions.create(prompt=prompt, **given)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens == sum(len(ids_of(text)) for text in texts)
    answer = server.client.completions.create(prompt=ids_of(PROMPT), **given)
    assert answer.choices[0].text == expected[0]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_seeds_of_their_own(server, stream):
    """Choice i has the text of seed + i; the tokens of all are in the usage."""
    expected = [
        text_alone(PROMPT, max_new_tokens=TOKENS, **{**SAMPLED, "seed": seed})
        for seed in (2**63 - 1, -(2**63))
    ]
    given = dict(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, n=2, seed=2**63 - 1)
    if not stream:
        answer = server.client.completions.create(**given)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.completion_tokens == 2 * TOKENS
        return
    texts, ends = ["", ""], []
    for chunk in server.client.completions.create(stream=True, **given):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert texts == expected and sorted(ends) == [0, 1]


def test_the_end_of_a_sequence(server):
    """A bias makes the end certain: min_tokens delays it, ignore_eos removes it, and it has no text."""
    given = dict(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logit_bias={"0": 100})
    ended = server.client.completions.create(**given)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    assert ended.usage.completion_tokens == 1
    later = server.client.completions.create(extra_body={"min_tokens": 4}, **given)
    assert later.choices[0].finish_reason == "stop"
    assert later.usage.completion_tokens == 5
    ignored = server.client.completions.create(extra_body={"ignore_eos": True}, **given)
    assert ignored.choices[0].finish_reason == "length"
    assert ignored.usage.completion_tokens == 6
    shown = server.client.completions.create(extra_body={"skip_special_tokens": False}, **given)
    assert shown.choices[0].text == tokenizer().eos_token


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_a_text_before_them(server, stream):
    text = text_alone(PROMPT, max_new_tokens=60, do_sample=False)
    stop = text[40:47]
    end = text.index(stop)
    given = dict(model=MODEL, prompt=PROMPT, max_tokens=60, temperature=0, stop=["not in it", stop])
    if stream:
        got = streamed(server, "/v1/completions", **given)
    else:
        choice = server.client.completions.create(**given).choices[0]
        got = choice.text, choice.finish_reason
    assert got == (text[:end], "stop")
    one = server.client.completions.create(**{**given, "stop": stop})
    assert one.choices[0].text == text[:end]
    assert one.usage.completion_tokens < 60


def test_a_stop_string_in_the_prompt_does_not_count(server):
    """The prompt ends with a newline, and the text may begin with one: "\\n\\n" is not in the text then."""
    text = text_alone("x = 1\n", max_new_tokens=12, do_sample=False)
    stop = "\n" + text[0]
    given = dict(model=MODEL, prompt="x = 1\n", max_tokens=12, temperature=0, stop=stop)
    assert server.client.completions.create(**given).choices[0].text == text.split(stop)[0]


def test_usage_of_a_stream(server):
    given = dict(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True)
    *chunks, last = server.client.completions.create(
        stream_options={"include_usage": True}, **given
    )
    assert last.choices == [] and last.usage.completion_tokens == TOKENS
    assert all(chunk.usage is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = server.client.completions.create(stream_options=options, **given)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == TOKENS
    chat = dict(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=5)
    *_, last = server.client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **chat
    )
    assert last.choices == [] and last.usage.completion_tokens == 5


def test_statistics_of_speculation(server):
    """The names are vLLM's; the numbers agree with each other and are in the last chunk of a stream."""
    given = dict(model=MODEL, prompt=PROMPT, max_tokens=64, temperature=0)
    before = list(server.engine.stats().reached_per_position)
    answer = server.post("/v1/completions", speculation="fixed", **given).json()
    told = answer["metrics"]["speculative_decoding"]
    histogram = told["acceptance_histogram"]
    assert sum(histogram) == told["num_spec_steps"] > 0
    accepted = sum(i * count for i, count in enumerate(histogram))
    assert accepted == told["num_accepted_draft_tokens"] > 0
    assert told["draft_acceptance_rate"] == accepted / told["num_draft_tokens"]
    assert told["mean_acceptance_length"] == 1 + accepted / told["num_spec_steps"]
    # Near the end, drafts are shorter, so not all that could do reach the next position.
    reached, counts = told["reached_per_position"], server.engine.stats().reached_per_position
    grown = [now - then for now, then in zip_longest(counts, before, fillvalue=0)]
    assert reached == grown[: len(reached)] and not any(grown[len(reached) :])
    assert reached[0] == told["num_spec_steps"]
    assert sum(reached[1:]) < sum(sum(histogram[i:]) for i in range(1, len(reached)))
    assert "metrics" not in server.post("/v1/completions", speculation="none", **given).json()
    for options in (None, {"include_usage": True}):
        stream = server.client.completions.create(
            stream=True, stream_options=options, extra_body={"speculation": "fixed"}, **given
        )
        *chunks, last = stream
        assert last.metrics["speculative_decoding"]["num_spec_steps"] == told["num_spec_steps"]
        assert not any(hasattr(chunk, "metrics") for chunk in chunks)


def test_log_probabilities(server):
    """Of the tokens of the text, in both forms; a part of a character has its bytes."""
    given = dict(model=MODEL, max_tokens=8, temperature=0)
    chat = server.client.chat.completions.create(
        messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2, **given
    )
    content = chat.choices[0].logprobs.content
    assert "".join(each.token for each in content) == chat.choices[0].message.content
    for each in content:
        assert each.top_logprobs[0].token == each.token  # greedy
        assert each.top_logprobs[0].logprob == each.logprob > each.top_logprobs[1].logprob
        assert bytes(each.bytes).decode() == each.token
    stream = server.client.chat.completions.create(
        messages=[{"role": "user", "content": "Hi"}],
        logprobs=True,
        top_logprobs=2,
        stream=True,
        **given,
    )
    chunks = [
        each for chunk in stream if (found := chunk.choices[0].logprobs) for each in found.content
    ]
    assert chunks == content
    completion = server.client.completions.create(prompt=PROMPT, logprobs=3, **given)
    told, text = completion.choices[0].logprobs, completion.choices[0].text
    assert "".join(told.tokens) == text
    for token, offset, top in zip(told.tokens, told.text_offset, told.top_logprobs, strict=True):
        assert text[offset:].startswith(token) and len(top) == 3 and token in top
    part = tokenizer().convert_tokens_to_ids("Ã")  # byte C3
    forced = server.client.chat.completions.create(
        messages=[{"role": "user", "content": "Hi"}],
        logprobs=True,
        logit_bias={str(part): 100},
        **{**given, "max_tokens": 1},
    )
    assert forced.choices[0].logprobs.content[0].bytes == [0xC3]


def test_models_tokens_and_text(server):
    (model,) = server.client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 512)
    answer = server.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert answer["tokens"] == ids_of(PROMPT) and answer["count"] == COLUMNS
    assert answer["token_strs"] == tokenizer().convert_ids_to_tokens(ids_of(PROMPT))
    assert answer["max_model_len"] == 512
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": PROMPT}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "Hi"}]).json()
    assert chat["tokens"] == ids_of("# user: Hi\n")
    assert TEMPLATE.startswith("{% for")


def test_many_clients_at_once(server):
    """Texts of simultaneous requests are those of their own calls."""
    seeds = range(12)
    expected = [
        text_alone(PROMPT, max_new_tokens=16, **{**SAMPLED, "seed": seed}) for seed in seeds
    ]

    async def all_at_once():
        async with server.asynchronous() as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, seed=seed)
                    for seed in seeds
                )
            )
            return [answer.choices[0].text for answer in answers]

    assert asyncio.run(all_at_once()) == expected


def test_the_checkpoint_recommends_what_a_request_leaves_open(monkeypatch):
    """As for Llama 3 or Qwen: a generation config with settings, and several ends of a sequence."""
    config = copy.deepcopy(target().generation_config)
    config.update(do_sample=True, temperature=0.5, top_k=20, top_p=0.9, eos_token_id=[0, 1])
    monkeypatch.setattr(target(), "generation_config", config)
    recommended = dict(temperature=0.5, top_k=20, top_p=0.9)
    with serving() as server:

        def text(**fields):
            given = dict(model=MODEL, prompt=PROMPT, max_tokens=TOKENS)
            answer = server.client.completions.create(**given, **fields)
            return answer.choices[0].text

        sampled = dict(do_sample=True, seed=5, max_new_tokens=TOKENS)
        assert text(seed=5) == text_alone(PROMPT, **sampled, **recommended)
        own = text_alone(PROMPT, **sampled, **{**recommended, "top_k": 0, "temperature": 1.0})
        assert text(seed=5, temperature=1, extra_body={"top_k": -1}) == own != text(seed=5)
        assert text(temperature=0) == text_alone(PROMPT, do_sample=False, max_new_tokens=TOKENS)
        ended = text(
            temperature=0, logit_bias={"1": 100}, extra_body={"skip_special_tokens": False}
        )
        assert ended == tokenizer().decode([1])
