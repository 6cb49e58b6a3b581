"""Files of training text: records and error messages."""

from __future__ import annotations

import json
import os

import pytest
import torch

from specdec_ext.training.data.batches import Example
from specdec_ext.training.data.records import TEXT_CHARACTERS, Record, read_records, split_records

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".jsonl" and isinstance(content, list):
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"text": "a\u2028b", "id": 3}, "a\u2028b"),
        ({"messages": CHAT}, CHAT),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            CHAT,
        ),
    ],
)
def test_known_columns_are_read(tmp_path, name, row, content):
    path = write(tmp_path / name, [row, row])
    assert [record.content for record in read_records(path)] == [content, content]


def test_named_columns_are_read(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"text": "a", "messages": CHAT, "story": "b"}])
    assert read_records(path, text_column="story")[0].content == "b"
    assert read_records(path, messages_column="messages")[0].content == CHAT
    with pytest.raises(
        ValueError, match=r"several could be the training text: .*; name the column"
    ):
        read_records(path)
    with pytest.raises(ValueError, match="two sources"):
        read_records(path, text_column="text", messages_column="messages")


def test_token_ids_are_read(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"tokens": [5, 6, 7, 8], "answers": [[1, 2], [3, 4]]}])
    (record,) = read_records(path)
    assert record.content.tokens.tolist() == [5, 6, 7, 8]
    assert record.content.loss_mask.tolist() == [False, True, False, True]


def test_text_file_is_cut_at_ends_of_lines(tmp_path):
    text = "".join(f"line {i}\n" for i in range(9000)) + "x" * (2 * TEXT_CHARACTERS + 5) + "\nend"
    records = read_records(write(tmp_path / "a.txt", "\ufeff" + text))
    assert "".join(record.content for record in records) == text
    assert max(len(record.content) for record in records) <= TEXT_CHARACTERS
    assert records[0].content.endswith("\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "holds no text"),
        ("a.txt", " \n\n", "holds no text"),
        ("a.jsonl", "", "holds no text"),
        ("a.json", "", "holds no text"),
        ("a.json", "[]", "holds no text"),
        ("a.csv", "x", "is of an unsupported type"),
        ("a.txt", b"ok\n\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', "line 3 is not valid JSON"),
        ("a.jsonl", "[" * 200_000, "line 1 is not valid JSON"),
        ("a.json", '{"text": "a"}\n{"text": "b"}', "not valid JSON"),
        ("a.json", {"text": "a"}, "a.json holds a dict; expected a list"),
        ("a.jsonl", ["a"], "line 1 is of type str; expected an object"),
        ("a.jsonl", [{"prompt": "a", "n": 1}], "its columns are 'prompt', 'n'; none is known"),
        ("a.jsonl", [{}], "its columns are none"),
        ("a.jsonl", [{"text": "a"}, {"prompt": "b"}], "line 2 has no column 'text'"),
        ("a.jsonl", [{"text": 3}], "column 'text' is of type int; expected text"),
        ("a.jsonl", [{"text": None}], "missing or null"),
        ("a.jsonl", [{"messages": []}], "its chat is an empty list"),
        ("a.jsonl", [{"messages": "hi"}], "its chat is of type str"),
        ("a.jsonl", [{"messages": ["hi"]}], "message 1 is of type str"),
        ("a.jsonl", [{"messages": [{"role": "boss", "content": "a"}]}], "role 'boss' is unknown"),
        ("a.jsonl", [{"messages": [{"role": ["user"], "content": "a"}]}], "role \\['user'\\]"),
        ("a.jsonl", [{"messages": [{"content": "a"}]}], "role None is unknown"),
        ("a.jsonl", [{"messages": [{"role": "user", "content": [1]}]}], "content is of type list"),
        ("a.jsonl", [{"messages": [{"role": "user"}]}], "content is missing or null"),
        ("a.jsonl", [{"text": "a\ud800b"}], "column 'text' is not text: .*surrogates"),
        ("a.jsonl", [{"messages": [{"role": "user", "content": "\udc00"}]}],
            "line 1, message 1: its content is not text"),
        ("a.jsonl", [{"tokens": []}], "not a list of token ids"),
        ("a.jsonl", [{"tokens": "abc"}], "not a list of token ids"),
        ("a.jsonl", [{"tokens": [1, -1]}], "not a list of token ids"),
        ("a.jsonl", [{"tokens": [1, True]}], "not a list of token ids"),
        ("a.jsonl", [{"tokens": [1, 2**40]}], "not a list of token ids"),
        ("a.jsonl", [{"tokens": [1, 10**400]}], 'line 1: "tokens" is not a list of token ids'),
        ("a.jsonl", '{"tokens": [1, 1e999, NaN]}', "not a list of token ids"),
        ("a.jsonl", '{"tokens": [1, ' + "9" * 9999 + "]}", "line 1 is not valid JSON"),
        ("a.jsonl", '{"text": NaN}', "column 'text' is of type float; expected text"),
        ("a.jsonl", [{"tokens": [1, 2], "answers": [[0, 10**400]]}], "within its 2 tokens"),
        ("a.jsonl", '{"messages": [{"role": ' + "[" * 900 + "]" * 900 + ', "content": "a"}]}',
            "message 1: role .* is unknown"),
        ("a.jsonl", [{"tokens": [1, 2], "answers": [[1, 3]]}], "within its 2 tokens"),
        ("a.jsonl", [{"tokens": [1, 2], "answers": [[2, 1]]}], "within its 2 tokens"),
        ("a.jsonl", [{"tokens": [1, 2], "answers": None}], "within its 2 tokens"),
    ],
)  # fmt: skip
def test_error_names_file_and_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message) as error:
        read_records(path)
    assert str(path) in str(error.value)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_records(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl"])
def test_pipe_is_refused(tmp_path, name):
    """Opening one would wait for a writer."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=f"{name} is a pipe, a socket or a device; expected a file"):
        read_records(tmp_path / name)


def test_split_depends_on_content_alone():
    """Copies of a record are on the same side, at any place and beside any other records."""
    records = [Record(f"line {i}", f"text {i}") for i in range(400)]
    training, held_out = split_records(records, one_in=10)
    assert 20 < len(held_out) < 60
    assert sorted([*training, *held_out], key=records.index) == records
    again = [Record("elsewhere", record.content) for record in reversed(records[:200] * 2)]
    sides = {record.content for record in split_records(again, one_in=10)[1]}
    assert sides == {record.content for record in held_out} & {r.content for r in again}


def test_both_sides_of_a_split_have_records():
    few = [Record("", f"text {i}") for i in range(3)]
    for one_in in (2, 3, 10**9):
        training, held_out = split_records(few, one_in)
        assert training
        assert held_out
    same = [Record("here", Example(torch.tensor([1, 2]), torch.tensor([True, True])))] * 3
    for records in (same, few[:1], []):
        with pytest.raises(ValueError, match="can't be split"):
            split_records(records)
    with pytest.raises(ValueError, match="expected at least 2"):
        split_records(few, 1)
