"""Prompt files in the formats of the field's benchmarks, and the questions that they become."""

import json
from collections import Counter

import pytest
from helpers.places import ROOT
from helpers.texts.chats import TEMPLATE

from specdec_ext import assets
from specdec_ext.evaluate.benchmark.prompts import (
    Conversation,
    Question,
    chosen,
    general,
    questions,
    read_conversations,
    rendered,
    takes_chats,
)

SHARED = ROOT.parent / "shared" / "data"
# A line of each format -> name, category, turns, whether it is a chat.
FORMATS = {
    "mt_bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        ("81", "writing", ("Write.", "Rewrite."), True),
    ),
    "spec_bench": (
        {
            "question_id": 161,
            "category": "translation",
            "turns": ["Translate: Ei"],
            "reference": [],
        },
        ("161", "translation", ("Translate: Ei",), True),
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": ""},
        ("HumanEval/0", "", ("def f():\n",), False),
    ),
    "gsm8k": ({"question": "1 + 1?", "answer": "#### 2"}, ("0", "", ("1 + 1?",), False)),
    "text": ("import os", ("0", "", ("import os",), False)),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_formats(name, suffix, tmp_path):
    row, expected = FORMATS[name]
    path = tmp_path / f"prompts{suffix}"
    path.write_text(json.dumps(row if suffix == ".jsonl" else [row]))
    (found,) = read_conversations(path)
    assert (found.name, found.category, found.turns, found.is_chat) == expected


@pytest.mark.parametrize(
    "name, count, categories, second_turns",
    [
        ("mt_bench", 80, 8, 80),
        ("humaneval", 80, 1, 0),
        ("gsm8k", 80, 1, 0),
        ("spec_bench", 480, 13, 80),
    ],
)
def test_the_files_of_the_benchmarks(name, count, categories, second_turns):
    path = SHARED / name / "question.jsonl"
    if not path.exists():
        pytest.skip("needs the files of the benchmarks")
    found = read_conversations(path)
    assert len(found) == count and all(each.is_chat for each in found)
    assert len({each.category for each in found}) == categories
    assert sum(len(each.turns) == 2 for each in found) == second_turns


@pytest.mark.parametrize(
    "row, message",
    [
        ({"turns": ["a", 3]}, "line 1: expected a text under 'prompt' or 'question', or a list"),
        ({"turns": ["a", ""]}, "line 1: expected a text under 'prompt' or 'question', or a list"),
        ({"turns": ["a"], "category": 7}, "line 1: category is 7; expected a text"),
        ({"turns": ["a", "\ud800"]}, "line 1: the prompt is not text"),
        ({"text": "a"}, "line 1: expected a text under 'prompt'"),
    ],
    ids=["number", "empty turn", "category", "surrogate", "another field"],
)
def test_bad_lines(row, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        read_conversations(path)


def test_the_bundled_general_prompts_have_categories_and_second_turns():
    found = general()
    categories = Counter(each.category for each in found)
    assert len(found) >= 16 and len(categories) >= 8 and set(categories.values()) == {2}
    assert any(len(each.turns) > 1 for each in found) and all(each.is_chat for each in found)
    assert len({turn for each in found for turn in each.turns}) == sum(
        len(each.turns) for each in found
    )


# --- selection --------------------------------------------------------------------------------------


def talks(*categories):
    return [
        Conversation(str(number), (f"first {number}", f"second {number}"), category, True)
        for number, category in enumerate(categories)
    ]


def names(found):
    return [each.name for each in found]


def test_selection_is_by_category_and_takes_from_all_alike():
    all_of_them = talks("a", "b", "a", "a", "b", "c")
    assert names(chosen(all_of_them)) == ["0", "2", "3", "1", "4", "5"]
    assert names(chosen(all_of_them, count=4)) == ["0", "2", "1", "5"]
    assert names(chosen(all_of_them, ["b", "a"], count=3)) == ["0", "2", "1"]
    assert names(chosen(all_of_them, count=100)) == names(chosen(all_of_them))
    assert {len(each.turns) for each in chosen(all_of_them, turns=1)} == {1}


def test_an_unknown_category_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="--category d: no prompt has it; categories are a, b"):
        chosen(talks("a", "b"), ["d"])
    with pytest.raises(ValueError, match="categories are none"):
        chosen(talks(""), ["d"])


# --- questions --------------------------------------------------------------------------------------


def test_a_second_turn_follows_the_answer_to_the_first():
    heard = []

    def answer(messages):
        heard.append(list(messages))
        return f"answer to {messages[-1]}"

    found, cut = questions(talks("a", "b"), answer)
    assert not cut and heard == [["first 0"], ["first 1"]]
    assert names(found) == ["0", "0, turn 2", "1", "1, turn 2"]
    assert found[1].messages == ("first 0", "answer to first 0", "second 0")
    assert [each["role"] for each in found[1].chat] == ["user", "assistant", "user"]
    assert found[1].text == "first 0\n\nanswer to first 0\n\nsecond 0"
    assert [each.category for each in found] == ["a", "a", "b", "b"]


def test_without_an_answer_there_is_no_second_turn_and_that_is_told():
    found, cut = questions(
        talks("a", "b"), lambda messages: None if messages[0] == "first 0" else "x"
    )
    assert names(found) == ["0", "1", "1, turn 2"] and cut == ["0"]


def test_a_chat_template_is_used_for_chats_if_there_is_one():
    tokenizer = assets.load_tokenizer()
    chats, texts = talks("a"), [Conversation("0", ("import os",))]
    assert not takes_chats(chats, tokenizer, None)
    with pytest.raises(ValueError, match="--chat: the model's tokenizer has no chat template"):
        takes_chats(chats, tokenizer, True)
    tokenizer.chat_template = TEMPLATE
    assert takes_chats(chats, tokenizer, None) and not takes_chats(chats, tokenizer, False)
    assert takes_chats(texts, tokenizer, True) and not takes_chats(texts, tokenizer, None)
    assert not takes_chats([*chats, *texts], tokenizer, None)
    question = Question("0", "", ("first", "answer", "second"))
    assert rendered(question, tokenizer, False) == question.text
    text = rendered(question, tokenizer, True)
    assert text != question.text and all(each in text for each in question.messages)


def test_a_template_that_refuses_is_an_error_with_the_way_out():
    tokenizer = assets.load_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no roles') }}"
    with pytest.raises(
        ValueError, match=r"prompt 7: the chat template refuses it .*pass --no-chat"
    ):
        rendered(Question("7", "", ("a",)), tokenizer, True)
