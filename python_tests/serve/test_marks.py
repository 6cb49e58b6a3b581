"""Marked drafts: the pieces of a text joined are the text, and each token has the mark of its burst."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from helpers.serving import MODEL, PROMPT, ids_of, serving, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_ext.display.detokenize import IncrementalDecoder
from specdec_ext.engine import Burst, Handle, Times
from specdec_ext.serve.chat import ChatAnswer
from specdec_ext.serve.text.choice import Choice, Piece
from specdec_ext.serve.text.marks import Marks, Part
from specdec_ext.serve.text.replies import Reply

TEXTS = st.lists(
    st.tuples(
        st.text("ab\n €😀", min_size=1, max_size=6) | st.sampled_from(["def f(", "é", "日本"]),
        st.booleans(),
    ),
    max_size=12,
)


def characters(parts: list[Part]) -> list[tuple[str, bool]]:
    return [(character, part["drafted"]) for part in parts for character in part["text"]]


def pieces_of(bursts: list[Burst], stop: list[str] = ()) -> list:
    """What a choice makes of the bursts of a request that ends at its length."""
    handle = Handle(1, Times(0.0))
    choice = Choice(0, handle, tokenizer(), stop, skip_special_tokens=True)
    pieces = []
    for burst in bursts:
        handle.emit(burst)
        pieces.append(choice.read(lambda *_: None))
    handle.finish("length")
    return [*pieces, choice.read(lambda *_: None)]


# --- the class --------------------------------------------------------------------------------------


@given(TEXTS, st.data())
def test_parts_survive_any_other_division(added, data):
    marks, given_parts = Marks(), [Part(text=text, drafted=drafted) for text, drafted in added]
    whole = "".join(text for text, _ in added)
    marks.add(given_parts)
    taken, start = [], 0
    while start < len(whole):
        end = data.draw(st.integers(start + 1, len(whole)))
        parts = marks.take(whole[start:end])
        assert "".join(part["text"] for part in parts) == whole[start:end]
        taken += characters(parts)
        start = end
    assert taken == characters(given_parts)


def test_text_that_is_left_out_takes_its_marks_along():
    marks = Marks()
    marks.add([Part(text="<think>", drafted=True), Part(text="why", drafted=False)])
    marks.add([Part(text="</think>", drafted=False), Part(text="so", drafted=True)])
    assert marks.take("why") == [{"text": "why", "drafted": False}]
    assert marks.take("so") == [{"text": "so", "drafted": True}]


def test_a_text_that_was_not_added_is_not_drafted():
    marks = Marks()
    marks.add([Part(text="a", drafted=True)])
    assert marks.take("b") == [{"text": "b", "drafted": False}]
    assert marks.take("a") == [{"text": "a", "drafted": True}]
    assert marks.take("") == []


# --- a choice: bytes of characters over tokens, stop strings ----------------------------------------


@settings(max_examples=150)
@given(
    TEXTS,
    st.lists(st.integers(1, 4), min_size=1),
    st.lists(st.text("ab€ ", min_size=1, max_size=3), max_size=2),
)
def test_pieces_joined_are_the_text_up_to_the_stop_string(texts, sizes, stop):
    ids = ids_of("".join(text for text, _ in texts))
    flags = [len(texts) > 1 and bool(texts[i % len(texts)][1]) for i in range(len(ids))]
    bursts, start = [], 0
    while start < len(ids):
        end = start + sizes[len(bursts) % len(sizes)]
        bursts.append(Burst(ids[start:end], flags[start:end]))
        start = end
    pieces = pieces_of(bursts, stop)
    whole = tokenizer().decode(ids, skip_special_tokens=True)
    found = [(start + len(each), start) for each in stop if (start := whole.find(each)) >= 0]
    if found:
        whole = whole[: min(found)[1]]
    told = [part for piece in pieces for part in piece.parts]
    assert "".join(part["text"] for part in told) == whole
    # A character has the mark of the token that completes it.
    expected, decoder, drafted = [], IncrementalDecoder(tokenizer()), False
    for token, drafted in zip(ids, flags, strict=True):
        expected += [(character, drafted) for character in decoder.feed(token)]
    expected += [(character, drafted) for character in decoder.flush()]
    assert characters(told) == expected[: len(whole)]
    for piece in pieces:
        assert all(part["text"] for part in piece.parts)
        marks = [part["drafted"] for part in piece.parts]
        assert all(a != b for a, b in pairwise(marks))


def test_a_character_of_several_tokens_counts_as_its_last():
    ids = ids_of("😀")
    assert len(ids) > 1
    flags = [False] * (len(ids) - 1) + [True]
    told = [part for piece in pieces_of([Burst(ids, flags)]) for part in piece.parts]
    assert told == [{"text": "😀", "drafted": True}]


# --- the server -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with serving({"drafter": "ngram"}) as running:
        yield running


def streamed(server, path: str, **body) -> list[dict]:
    body = {"model": MODEL, "max_tokens": 60, "temperature": 0, "mark_drafted": True, **body}
    answer = server.post(path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
    chunks = [json.loads(event) for event in events if event and event != "[DONE]"]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def by_burst(server, monkeypatch, path: str, **body) -> tuple[list[dict], list[Burst]]:
    """The choices of a stream, and what the engine emitted for it."""
    bursts, emit = [], Handle.emit
    with monkeypatch.context() as patched:
        patched.setattr(
            Handle, "emit", lambda self, burst: (bursts.append(burst), emit(self, burst))[1]
        )
        return streamed(server, path, **body), bursts


@pytest.mark.parametrize("stop", [[], ["\n\n"], ["def", "\n#"]], ids=["no stop", "line", "words"])
def test_a_stream_marks_what_the_engine_accepted(server, monkeypatch, stop):
    choices, bursts = by_burst(server, monkeypatch, "/v1/completions", prompt=PROMPT, stop=stop)
    assert all("".join(p["text"] for p in each["pieces"]) == each["text"] for each in choices)
    told = [piece for each in choices for piece in each["pieces"]]
    decoder, expected = IncrementalDecoder(tokenizer()), []
    for burst in bursts:
        for token, drafted in zip(burst.tokens, burst.drafted, strict=True):
            expected += [(character, drafted) for character in decoder.feed(token)]
    assert characters(told) == expected[: len(characters(told))]
    if not stop:
        assert len(characters(told)) == len(expected)
        assert {piece["drafted"] for piece in told} == {True, False}


def test_whole_answers_and_chats_are_marked_too(server):
    asked = {"model": MODEL, "max_tokens": 60, "temperature": 0, "mark_drafted": True}
    (choice,) = server.post("/v1/completions", prompt=PROMPT, **asked).json()["choices"]
    parts = characters(choice["pieces"])
    assert parts == characters(
        [p for each in streamed(server, "/v1/completions", prompt=PROMPT) for p in each["pieces"]]
    )
    assert "".join(piece["text"] for piece in choice["pieces"]) == choice["text"]
    messages = [{"role": "user", "content": "read a file"}]
    (choice,) = server.post("/v1/chat/completions", messages=messages, **asked).json()["choices"]
    content = choice["message"]["content"]
    assert content and "".join(piece["text"] for piece in choice["pieces"]) == content
    chunks = streamed(server, "/v1/chat/completions", messages=messages)
    for each in chunks:
        joined = "".join(piece["text"] for piece in each["pieces"])
        assert joined == each["delta"].get("content", "")
    told = [piece for each in chunks for piece in each["pieces"]]
    assert characters(told) == characters(choice["pieces"])
    assert {piece["drafted"] for piece in told} == {True, False}


def test_several_choices_have_their_own_marks(server):
    choices = streamed(server, "/v1/completions", prompt=PROMPT, n=3, seed=1, temperature=0.8)
    assert {each["index"] for each in choices} == {0, 1, 2}
    assert all("".join(p["text"] for p in each["pieces"]) == each["text"] for each in choices)


def test_nothing_is_marked_unless_it_is_asked_for(server):
    body = {"model": MODEL, "max_tokens": 8}
    assert "pieces" not in server.post("/v1/completions", prompt=PROMPT, **body).text
    messages = [{"role": "user", "content": "a"}]
    assert "pieces" not in server.post("/v1/chat/completions", messages=messages, **body).text


def test_reasoning_that_has_the_words_of_the_content_takes_its_marks_along():
    choice = SimpleNamespace(index=0)
    service = SimpleNamespace(tokenizer=tokenizer(), template=None)
    source = ChatAnswer(
        SimpleNamespace(service=service, choices=[choice]),
        SimpleNamespace(mark_drafted=True),
        prompt=[],
        tools=[],
    )
    source._deltas(choice, Piece([Part(text="so", drafted=True), Part(text="so", drafted=False)]))
    assert source._pieces(choice, {"reasoning_content": "so"}) == []
    assert source._pieces(choice, {"content": "so"}) == [{"text": "so", "drafted": False}]


def test_reasoning_in_a_stream_has_no_pieces(server, monkeypatch):
    fed = []

    def feed(self, text):
        fed.append(len(text))
        half = len(text) // 2
        told = [{"reasoning_content": text[:half]}, {"content": text[half:]}]
        return [delta for delta in told if next(iter(delta.values()))]

    monkeypatch.setattr(Reply, "feed", feed)
    messages = [{"role": "user", "content": "read a file"}]
    choices, bursts = by_burst(server, monkeypatch, "/v1/chat/completions", messages=messages)
    decoder = IncrementalDecoder(tokenizer())
    marked = [
        (character, drafted)
        for burst in bursts
        for token, drafted in zip(burst.tokens, burst.drafted, strict=True)
        for character in decoder.feed(token)
    ]
    expected, end = [], 0
    for length in fed:
        expected += marked[end + length // 2 : end + length]
        end += length
    told = characters([piece for each in choices for piece in each["pieces"]])
    assert told == expected
