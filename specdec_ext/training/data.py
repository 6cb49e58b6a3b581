"""Training text as tokens: what a head learns from, or what its target is asked to answer.

A file is read into records (:mod:`specdec_ext.training.records`). Records become examples as they are
(:func:`encode`) or prompts that the target answers anew (:func:`prompts`, then
:func:`specdec_ext.training.regenerate.regenerate`). A head drafts what its target writes, so the target's
own answers are the better text.

Of a plain text every token counts, of a chat those that the assistant wrote. Which these are is asked of
the chat template: by its ``{% generation %}`` markers if it has them, else an assistant's turn is what
the template adds to its own prompt for that turn. Where a template renders a finished turn otherwise than
the last one (many drop the reasoning), a chat becomes several texts, each as the target saw it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec_ext.training.batches import Example
from specdec_ext.training.records import Chat, Record, Transcript, read_records

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TOKENIZED_AT_ONCE = 64


def read_examples(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    text_column: str | None = None,
    messages_column: str | None = None,
) -> list[Example]:
    """All examples of a file, in its order: :func:`read_records` and :func:`encode`."""
    records = read_records(path, text_column=text_column, messages_column=messages_column)
    return encode(records, tokenizer, max_length=max_length)


def encode(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> list[Example]:
    """Tokens and loss masks, in the order of the records.

    A plain text becomes windows of ``max_length`` tokens, each behind what the tokenizer puts before a
    text. A chat is cut there. What has nothing to learn from (a text of one token, a chat whose answers
    are all cut off) is left out with a warning that counts it.

    Raises:
        ValueError: for ``max_length`` below 2; chats where the tokenizer has no chat template, or one that
            refuses them or does not tell what the assistant wrote; nothing left to learn from.
    """
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}; expected at least 2 tokens")
    made = list(_encode_each(records, tokenizer, max_length))
    examples = [example for each in made for example in each if bool(example.loss_mask[1:].any())]
    empty = sum(not any(bool(example.loss_mask[1:].any()) for example in each) for each in made)
    if not examples:
        raise ValueError(
            f"none of the {len(records)} records has anything to learn from within max_length={max_length}: "
            "texts need 2 tokens, chats an assistant's turn that begins before"
        )
    if empty:
        warnings.warn(
            f"{empty} of {len(records)} records have nothing to learn from within max_length={max_length} "
            "and are left out",
            stacklevel=2,
        )
    return examples


def prompts(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: tuple[int, int] = (16, 256),
    seed: int = 0,
) -> list[Tensor | Chat]:
    """What the target is to answer, one for each record that has as much.

    Of a chat that is the chat. Of a text it is a beginning of random length, of every other text from the
    beginning of a random line; of tokens it is what stands before the first answer.

    Args:
        records: as read.
        tokenizer: the target's.
        lengths: fewest and most tokens of a text's beginning, both possible.
        seed: of the lengths and lines; another one gives other beginnings of the same texts.

    Raises:
        ValueError: for ``lengths`` that are no range, or texts that are all shorter.
    """
    fewest, most = lengths
    if not 1 <= fewest <= most:
        raise ValueError(f"lengths is {lengths}; expected 1 <= fewest <= most")
    draw = np.random.default_rng(seed)
    found: list[Tensor | Chat] = []
    for index, record in enumerate(records):
        length, line = int(draw.integers(fewest, most + 1)), draw.random()
        content = record.content
        if isinstance(content, list):
            found.append(content)
        elif isinstance(content, Example):
            start = int(content.loss_mask.int().argmax())
            if start:
                found.append(content.tokens[:start])
        else:
            if index % 2:
                content = content[content.find("\n", int(line * len(content))) + 1 :]
            # A token is hardly ever longer than 16 characters: the rest need not be tokenized.
            ids = tokenizer(content[: 16 * length])["input_ids"][:length]
            if len(ids) == length:
                found.append(torch.tensor(ids, device="cpu"))
    if not found:
        raise ValueError(
            f"none of the {len(records)} texts is long enough for a prompt of {fewest} to {most} tokens"
        )
    return found


def chat_tokens(
    messages: Chat,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    add_generation_prompt: bool = False,
) -> list[int]:
    """A chat as the target reads it; ``where`` is for the message.

    Raises:
        ValueError: for a tokenizer without chat template, or a chat that its template refuses.
    """
    return _render(
        messages,
        tokenizer,
        where,
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
    )


def append_turn(texts: list[Transcript], prompt: list[int], answer: list[int]) -> None:
    """Add a turn to a chat's texts: to the last one if the prompt goes on from it, else as a new one."""
    if not texts or prompt[: len(texts[-1].tokens)] != texts[-1].tokens:
        texts.append(Transcript())
    texts[-1].tokens = prompt + answer
    texts[-1].answers.append((len(prompt), len(prompt) + len(answer)))


def _encode_each(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[list[Example]]:
    before = _tokens_before_text(tokenizer)
    if len(before) >= max_length:
        raise ValueError(
            f"max_length={max_length} leaves no room behind the {len(before)} tokens that begin every text"
        )
    for start in range(0, len(records), _TOKENIZED_AT_ONCE):
        chunk = records[start : start + _TOKENIZED_AT_ONCE]
        texts = [record.content for record in chunk if isinstance(record.content, str)]
        ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        for record in chunk:
            if isinstance(record.content, str):
                yield _windows(next(ids), before, max_length)
            elif isinstance(record.content, Example):
                cut = record.content
                yield [Example(cut.tokens[:max_length], cut.loss_mask[:max_length])]
            else:
                yield [
                    text.example(max_length)
                    for text in _chat_texts(record.content, tokenizer, record.where)
                ]


def _tokens_before_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text, such as the begin-of-sequence token."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = range(len(whole) - len(plain) + 1)
    return whole[: next((s for s in starts if whole[s : s + len(plain)] == plain), 0)]


def _windows(ids: list[int], before: list[int], max_length: int) -> list[Example]:
    size = max_length - len(before)
    texts = (before + ids[start : start + size] for start in range(0, len(ids), size))
    windows = [torch.tensor(text, device="cpu") for text in texts]
    return [Example(each, torch.ones_like(each, dtype=torch.bool)) for each in windows]


def _chat_texts(messages: Chat, tokenizer: PreTrainedTokenizerBase, where: str) -> list[Transcript]:
    """The texts of a chat, with what the assistant wrote."""
    if _GENERATION_MARKER.search(_template(tokenizer, where)) and tokenizer.is_fast:
        rendered = _render(
            messages, tokenizer, where, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = [0, *rendered["assistant_masks"], 0]
        edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        return [Transcript(list(rendered["input_ids"]), spans)]
    texts: list[Transcript] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = chat_tokens(messages[:turn], tokenizer, where, add_generation_prompt=True)
        whole = chat_tokens(messages[: turn + 1], tokenizer, where)
        if whole[: len(prompt)] != prompt:
            raise ValueError(
                f"{where}: the chat template does not tell what the assistant wrote: with message {turn + 1} "
                "the chat does not begin with the prompt for it. Give a template with {% generation %} "
                "markers, or let the target write the answers (regenerate)"
            )
        answer = whole[len(prompt) :]
        if tokenizer.eos_token_id in answer:  # what follows it is the template's
            answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
        append_turn(texts, prompt, answer)
    return texts


def _template(tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ValueError(
            f"{where} is a chat, and the target's tokenizer has no chat template; give plain texts, or set "
            "tokenizer.chat_template"
        ) from error


def _render(messages: Chat, tokenizer: PreTrainedTokenizerBase, where: str, **options: Any) -> Any:
    _template(tokenizer, where)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateError as error:
        raise ValueError(f"{where}: the chat template refuses this chat: {error}") from error
