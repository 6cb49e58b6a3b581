"""Answers of the target: they do not depend on the batch and are never made twice."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from helpers.models.tiny import VOCAB, tiny_model
from helpers.texts.tiny_text import CHARACTERS, FORGETFUL, PLAIN, tiny_tokenizer

import specdec_ext
from specdec_ext.training.data import regenerate as module
from specdec_ext.training.data.examples import read_examples
from specdec_ext.training.data.fingerprint import fingerprint
from specdec_ext.training.data.regenerate import regenerate

ROOM = {"max_new_tokens": 5, "max_length": 200}
PROMPTS = [torch.arange(1, 1 + length) for length in (7, 3, 9, 4, 2)]
CHATS = [
    [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "not by the target"},
        {"role": "user", "content": "and?"},
    ]
    for content in ("hi", "why so")
]


def fresh_model():
    """A copy that a test may change."""
    return copy.deepcopy(tiny_model("llama"))


@pytest.fixture
def model():
    return fresh_model()


@pytest.fixture
def passes(monkeypatch):
    """The sizes of the batches that the target continued."""
    rows = []
    generate = specdec_ext.generate

    def counted(target, tokens, **kwargs):
        rows.append(len(tokens))
        return generate(target, tokens, **kwargs)

    monkeypatch.setattr(module, "generate", counted)
    return rows


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.loss_mask, b.loss_mask)
        for a, b in zip(first, second, strict=True)
    )


def test_answers_are_those_of_the_target(model, tmp_path):
    examples = regenerate(model, PROMPTS, tmp_path / "a.jsonl", batch=2, **ROOM)
    for prompt, example in zip(PROMPTS, examples, strict=True):
        expected = model.generate(prompt[None], max_new_tokens=5, do_sample=False)[0]
        assert torch.equal(example.tokens, expected)
        assert example.loss_mask.tolist() == [False] * len(prompt) + [True] * 5


def test_answer_ends_with_the_end_token(model, tmp_path):
    """It has the end token and no paddings."""
    whole = regenerate(model, PROMPTS, tmp_path / "a.jsonl", **ROOM)
    end = int(whole[0].tokens[-3])
    model.generation_config.eos_token_id = [end, VOCAB + 5]
    model.generation_config.pad_token_id = end
    cut = regenerate(model, PROMPTS, tmp_path / "b.jsonl", **ROOM)
    assert cut[0].tokens.tolist() == whole[0].tokens[:-2].tolist()
    for prompt, example in zip(PROMPTS, cut, strict=True):
        assert end not in example.tokens[len(prompt) : -1]


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_greedy_answers_depend_on_the_prompt_alone(model, tmp_path, drafter):
    together = regenerate(model, PROMPTS, tmp_path / "a.jsonl", batch=5, **ROOM)
    alone = regenerate(model, PROMPTS[::-1], tmp_path / "b.jsonl", batch=1, drafter=drafter, **ROOM)
    assert same(together, alone[::-1])


def test_sampled_answers_depend_on_the_seed(model, tmp_path):
    prompts = [PROMPTS[1]] * 40
    sampled = {**ROOM, "temperature": 1.0}
    first = regenerate(model, prompts, tmp_path / "a.jsonl", **sampled)
    assert len({tuple(example.tokens.tolist()) for example in first}) > 35
    assert same(first, regenerate(model, prompts, tmp_path / "b.jsonl", **sampled))
    assert not same(first, regenerate(model, prompts, tmp_path / "b.jsonl", seed=1, **sampled))
    cold = regenerate(model, prompts, tmp_path / "a.jsonl", **{**ROOM, "temperature": 1e-4})
    assert same(cold, regenerate(model, prompts, tmp_path / "a.jsonl", **ROOM))


def test_chats_are_answered_turn_by_turn(model, tmp_path):
    model.generation_config.eos_token_id = 0
    tokenizer = tiny_tokenizer()
    force_end(model)
    examples = regenerate(model, CHATS, tmp_path / "a.jsonl", tokenizer=tokenizer, **ROOM)
    assert len(examples) == 2
    for chat, example in zip(CHATS, examples, strict=True):
        text = "".join(CHARACTERS[token] for token in example.tokens.tolist())
        assert "not by the target" not in text
        assert text.startswith(f"<user>{chat[0]['content']}\n<assistant>")
        assert "\n<user>and?\n<assistant>" in text
        edges = example.loss_mask.int().diff(prepend=torch.tensor([0]))
        assert (edges == 1).sum() == 2
        for start in (edges == 1).nonzero().flatten().tolist():
            written = example.tokens[start:][example.loss_mask[start:].cumprod(0).bool()]
            answer = model.generate(example.tokens[None, :start], max_new_tokens=5, do_sample=False)
            assert torch.equal(written, answer[0, start:])


def force_end(model):
    """Greedy decoding ends each answer with token 0 within a few tokens."""
    seen = []

    def end_soon(module, args, output):
        seen.append(None)
        if len(seen) % 3 == 0:
            output.logits[..., 0] += 1e6
        return output

    model.register_forward_hook(end_soon)


def test_texts_of_a_template_that_drops_parts_are_resumed(model, tmp_path, passes):
    template = FORGETFUL.replace("loop.last and m.role == 'assistant'", "loop.last")
    tokenizer = tiny_tokenizer(template)
    model.generation_config.eos_token_id = list(range(VOCAB))
    path = tmp_path / "a.jsonl"
    first = regenerate(model, CHATS, path, tokenizer=tokenizer, **ROOM)
    assert len(first) == 4
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (
        lines[:3],
        [*lines[:3], lines[3][:-5]],
    ):  # without the last text, or with a part of it
        path.write_bytes(b"".join(kept))
        passes.clear()
        assert same(regenerate(model, CHATS, path, tokenizer=tokenizer, **ROOM), first)
        assert passes == [1, 1]
        assert path.read_bytes().splitlines(keepends=True) == lines


def test_cut_answer_ends_its_chat(model, tmp_path):
    examples = regenerate(model, CHATS, tmp_path / "a.jsonl", tokenizer=tiny_tokenizer(), **ROOM)
    assert [int(example.loss_mask.sum()) for example in examples] == [5, 5]


def test_stopped_run_is_continued(model, tmp_path, passes, monkeypatch):
    class Stopped(Exception):
        pass

    def stop(file):
        raise Stopped

    whole = regenerate(model, PROMPTS, tmp_path / "a.jsonl", batch=2, **ROOM)
    path = tmp_path / "b.jsonl"
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(os, "fsync", stop)  # called after each batch
        regenerate(model, PROMPTS, path, batch=2, **ROOM)
    answered = len(path.read_text().splitlines())
    assert answered in (1, 2)
    with path.open("ab") as file:
        file.write(b'{"target": "half a li')
    passes.clear()
    assert same(regenerate(model, PROMPTS, path, batch=2, **ROOM), whole)
    assert sum(passes) == 5 - answered
    passes.clear()
    more = [*PROMPTS, torch.tensor([5, 6])]
    assert same(regenerate(model, more, path, batch=2, **ROOM)[:5], whole)
    assert passes == [1]


def test_file_can_be_read_as_training_text(model, tmp_path):
    path = tmp_path / "a.jsonl"
    written = regenerate(model, PROMPTS, path, **ROOM)
    read = read_examples(path, tiny_tokenizer(), max_length=200)
    assert same(*(sorted(each, key=lambda e: len(e.tokens)) for each in (written, read)))


def test_other_settings_give_other_answers(model, tmp_path, passes):
    path = tmp_path / "a.jsonl"
    regenerate(model, PROMPTS, path, **ROOM)
    regenerate(model, PROMPTS, path, max_new_tokens=6, max_length=200)
    assert sum(passes) == 10


def test_another_chat_template_gives_other_answers(model, tmp_path, passes):
    """The prompts are other tokens."""
    path, count = tmp_path / "a.jsonl", 0
    for template in (PLAIN, PLAIN.replace("<assistant>", "<model>")):
        regenerate(model, CHATS[:1], path, tokenizer=tiny_tokenizer(template), **ROOM)
        assert sum(passes) > count
        count = sum(passes)


def test_answers_of_another_target_are_refused(model, tmp_path):
    path = tmp_path / "a.jsonl"
    regenerate(model, PROMPTS, path, **ROOM)
    other = fresh_model()
    with torch.no_grad():
        other.lm_head.weight[3, 3] += 1
    assert fingerprint(fresh_model()) == fingerprint(model) != fingerprint(other)
    with pytest.raises(ValueError, match=f"another target .* this one is {fingerprint(other)}"):
        regenerate(other, PROMPTS, path, **ROOM)


def test_error_names_a_damaged_line(model, tmp_path):
    path = tmp_path / "a.jsonl"
    regenerate(model, PROMPTS, path, **ROOM)
    lines = path.read_text().splitlines(keepends=True)
    for damaged in (
        "{}\n",
        "[]\n",
        "x\n",
        json.dumps({**json.loads(lines[1]), "answers": [3]}) + "\n",
    ):
        path.write_text("".join([lines[0], damaged, *lines[2:]]))
        with pytest.raises(ValueError, match="line 2 is damaged"):
            regenerate(model, PROMPTS, path, **ROOM)
        assert path.read_text() == "".join([lines[0], damaged, *lines[2:]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_length": 5}, "to leave room for a prompt"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"batch": 0}, "batch is 0"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [torch.tensor([], dtype=torch.int64)]}, r"prompt 1 has shape \[0\]"),
        ({"prompts": [PROMPTS[0], PROMPTS[0].float()]}, r"prompt 2 has shape \[7\] and dtype torch.float32"),
        ({"prompts": [torch.tensor([1, VOCAB])]}, "ids 1 to 97, but the target's vocabulary has 97 tokens"),
        ({"prompts": [torch.tensor([-1])]}, "ids -1 to -1"),
        ({"prompts": CHATS}, "prompt 1 is a chat; pass the target's tokenizer"),
        ({"prompts": CHATS, "tokenizer": tiny_tokenizer(None)}, "no chat template"),
        ({"prompts": [CHATS[0][1:2]], "tokenizer": tiny_tokenizer()}, "no message to answer"),
        ({"max_length": 6}, "none of the 5 prompts leaves room"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(model, tmp_path, arguments, message, passes):
    arguments = {"prompts": PROMPTS, "cache_file": tmp_path / "a.jsonl", **ROOM, **arguments}
    with pytest.raises(ValueError, match=message):
        regenerate(model, **arguments)
    assert not passes


def test_too_long_prompts_are_counted_in_a_warning(model, tmp_path):
    with pytest.warns(UserWarning, match="2 of 5 prompts are left out, because they leave no room"):
        examples = regenerate(model, PROMPTS, tmp_path / "a.jsonl", max_new_tokens=5, max_length=9)
    assert [len(example.tokens) for example in examples] == [8, 9, 7]
