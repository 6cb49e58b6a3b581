"""Training text as tokens: windows, chats with masks of the assistant's tokens, prompts."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.texts.tiny_text import (
    CHARACTERS,
    END,
    FORGETFUL,
    MARKED,
    MISLEADING,
    PLAIN,
    STRICT,
    tiny_tokenizer,
)

from specdec_ext.training.data.batches import Example
from specdec_ext.training.data.examples import encode, prompts, read_examples
from specdec_ext.training.data.records import Record

CHAT = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]


def marked(example: Example) -> str:
    """The text with brackets around masked tokens."""
    text, inside = "", False
    for token, learnt in zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True):
        text += "[" * (learnt and not inside) + "]" * (inside and not learnt) + CHARACTERS[token]
        inside = learnt
    return text + "]" * inside


def chat_record(messages=CHAT) -> list[Record]:
    return [Record("here", messages)]


def test_text_is_cut_into_windows():
    examples = encode([Record("", "abcdefgh")], tiny_tokenizer(), max_length=3)
    assert [marked(example) for example in examples] == ["[abc]", "[def]", "[gh]"]
    assert examples[0].tokens.dtype == torch.int64


def test_each_window_begins_with_the_tokenizers_first_tokens():
    examples = encode([Record("", "abcde")], tiny_tokenizer(begins=True), max_length=3)
    assert [marked(example) for example in examples] == [f"[{END}{w}]" for w in ("ab", "cd", "e")]
    with pytest.raises(ValueError, match=r"max_length=2 leaves no room after the 2 tokens"):
        encode([Record("", "ab")], TwoBegin(), max_length=2)


class TwoBegin:
    """A tokenizer that adds two tokens at the beginning."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [7, 8, 3] if add_special_tokens else [3]}


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["differences", "markers"])
def test_mask_of_a_chat_has_the_assistants_tokens(template):
    (example,) = encode(chat_record(), tiny_tokenizer(template), max_length=200)
    expected = (
        f"<system>be\n<user>hi\n<assistant>[yes{END}]\n<user>so\n<assistant>[no{END}]"
        + "\n" * (template is MARKED)
    )
    assert marked(example) == expected


def test_template_that_drops_parts_gives_a_text_per_turn():
    """The second prompt does not have the "(hm)" of the first answer."""
    examples = encode(chat_record(), tiny_tokenizer(FORGETFUL), max_length=200)
    assert [marked(example) for example in examples] == [
        f"<system>be\n<user>hi\n<assistant>[(hm)yes{END}]",
        f"<system>be\n<user>hi\n<assistant>yes{END}\n<user>so\n<assistant>[(hm)no{END}]",
    ]


def test_chat_is_cut_at_max_length():
    (example,) = encode(chat_record(), tiny_tokenizer(), max_length=32)
    assert marked(example) == "<system>be\n<user>hi\n<assistant>[y]"


def test_chats_with_unknown_masks_are_refused():
    with pytest.raises(ValueError, match=r"here: the chat template does not show .* message 3"):
        encode(chat_record(), tiny_tokenizer(MISLEADING), max_length=200)
    with pytest.raises(ValueError, match=r"here is a chat, but .* has no chat template"):
        encode(chat_record(), tiny_tokenizer(None), max_length=200)
    with pytest.raises(ValueError, match="here: the chat template refuses this chat: user first"):
        encode(chat_record(), tiny_tokenizer(STRICT), max_length=200)


def test_records_without_tokens_to_learn_are_reported():
    short = Record("", "a")
    unanswered = Record("", CHAT[:2])
    with pytest.warns(UserWarning, match="2 of 3 records have no token to learn from"):
        examples = encode([short, Record("", "abc"), unanswered], tiny_tokenizer(), max_length=30)
    assert [marked(example) for example in examples] == ["[abc]"]
    for records in ([short], [unanswered], [short, unanswered]):
        message = "none of the . records .* a text needs at least 2 tokens"
        with pytest.raises(ValueError, match=message):
            encode(records, tiny_tokenizer(), max_length=30)
    with pytest.raises(ValueError, match="none of the 1 records"):
        encode(chat_record(), tiny_tokenizer(), max_length=10)
    with pytest.raises(ValueError, match="expected at least 2 tokens"):
        encode([short], tiny_tokenizer(), max_length=1)


def test_last_window_of_one_token_is_dropped():
    examples = encode([Record("", "abcd")], tiny_tokenizer(), max_length=3)
    assert [marked(example) for example in examples] == ["[abc]"]


def test_file_of_chats_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT[:3]}))
    examples = read_examples(path, tiny_tokenizer(), max_length=200)
    assert [int(example.loss_mask.sum()) for example in examples] == [7, 4]


def test_many_texts_keep_their_order():
    texts = [f"text {i:03}" for i in range(150)]
    examples = encode([Record("", text) for text in texts], tiny_tokenizer(), max_length=20)
    assert [marked(example)[1:-1] for example in examples] == texts


def test_prompts_of_texts_begin_at_lines():
    text = "".join(f"{i:03} {'x' * (i % 7)}\n" for i in range(60))
    tokenizer = tiny_tokenizer()
    records = [Record("", text)] * 80
    made = [
        "".join(CHARACTERS[t] for t in p.tolist())
        for p in prompts(records, tokenizer, lengths=(4, 9))
    ]
    assert {len(prompt) for prompt in made} == {4, 5, 6, 7, 8, 9}
    starts = [prompt for prompt in made if text.startswith(prompt)]
    assert 40 <= len(starts) < 60
    assert all(prompt in text and prompt[:3].isdigit() for prompt in made)
    again = prompts(records, tokenizer, lengths=(4, 9))
    same = zip(prompts(records, tokenizer, lengths=(4, 9)), again, strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    other = prompts(records, tokenizer, lengths=(4, 9), seed=1)
    assert any(len(a) != len(b) for a, b in zip(other, again, strict=False))


def test_prompts_of_chats_and_tokens():
    tokens = Example(torch.tensor([3, 4, 5, 6]), torch.tensor([False, False, True, False]))
    answer = Example(torch.tensor([3, 4]), torch.tensor([True, True]))
    made = prompts([Record("", CHAT), Record("", tokens), Record("", answer)], tiny_tokenizer())
    assert made[0] == CHAT
    assert made[1].tolist() == [3, 4]
    assert len(made) == 2
    with pytest.raises(ValueError, match="none of the 1 records is long enough"):
        prompts([Record("", "abc")], tiny_tokenizer(), lengths=(4, 9))
    for lengths in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match="expected 1 <= fewest <= most"):
            prompts([Record("", "abc")], tiny_tokenizer(), lengths=lengths)
