"""Turn records of training text into tokenized examples, or into prompts for the target.

Files are read into records (:mod:`specdec_ext.training.data.records`). :func:`encode` turns records into
examples directly. :func:`prompts` turns them into prompts, which the target answers
(:func:`specdec_ext.training.data.regenerate.regenerate`). A head drafts what its target writes, so the
target's own answers are the better training text.

In a plain text all tokens are in the loss mask, in a chat only those that the assistant wrote. They are found
with the chat template: by its ``{% generation %}`` markers if it has them; otherwise an assistant's turn is
what the template appends to its own prompt for that turn. Many templates render a finished turn differently
from the last one (they drop the reasoning). Such a chat becomes several texts, each as the target saw it.
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

from specdec_ext.display.progress import tracked
from specdec_ext.training.data.batches import Example
from specdec_ext.training.data.records import Chat, Record, Transcript, read_records

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
    """Read the training texts of a file, in their order: :func:`read_records`, then :func:`encode`.

    Args:
        path: a ``.txt``, ``.json`` or ``.jsonl`` file (:mod:`specdec_ext.training.data.records`).
        tokenizer: the target's tokenizer.
        max_length: largest number of tokens of an example.
        text_column: name of the column of texts; by default ``"text"``.
        messages_column: name of the column of chats; by default ``"messages"`` or ``"conversations"``.

    Raises:
        OSError: for a file that can't be read.
        ValueError: for a damaged file, or as :func:`encode`.
    """
    records = read_records(path, text_column=text_column, messages_column=messages_column)
    return encode(records, tokenizer, max_length=max_length)


def encode(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> list[Example]:
    """Tokenize records and make their loss masks; the order stays.

    A plain text is split into windows of ``max_length`` tokens, each beginning with the tokens that the
    tokenizer puts before a text. A chat is cut to ``max_length``. Records without a token to learn from (a
    text of one token, a chat whose answers are all cut off) are left out, and a warning counts them.

    Raises:
        ValueError: for ``max_length`` below 2; for chats if the tokenizer has no chat template, or one that
            refuses the chat or does not show what the assistant wrote; if nothing is left to learn from.
    """
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}; expected at least 2 tokens")
    made = []
    with tracked("tokenizing", len(records), "record") as work:
        for encoded in _encode_each(records, tokenizer, max_length):
            made.append(encoded)
            work.advance()
    examples = [example for each in made for example in each if bool(example.loss_mask[1:].any())]
    empty = sum(not any(bool(example.loss_mask[1:].any()) for example in each) for each in made)
    if not examples:
        raise ValueError(
            f"none of the {len(records)} records has a token to learn from within max_length={max_length}: a "
            "text needs at least 2 tokens, and a chat an assistant's turn that begins before max_length"
        )
    if empty:
        warnings.warn(
            f"{empty} of {len(records)} records have no token to learn from within max_length={max_length} "
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
    """Make prompts for the target, one for each record that is long enough.

    The prompt of a chat is the chat itself. The prompt of a text is a piece of random length; in every other
    record it starts at the beginning of the text, in the others at a random line. The prompt of a tokenized
    record is what precedes its first answer.

    Args:
        records: the records.
        tokenizer: the target's tokenizer.
        lengths: smallest and largest number of tokens of a prompt from a text, both inclusive.
        seed: seed of the lengths and lines; another seed gives other prompts from the same texts.

    Raises:
        ValueError: for invalid ``lengths``, or if all texts are too short.
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
            # A token rarely has more than 16 characters, so the rest need not be tokenized.
            ids = tokenizer(content[: 16 * length])["input_ids"][:length]
            if len(ids) == length:
                found.append(torch.tensor(ids, device="cpu"))
    if not found:
        raise ValueError(
            f"none of the {len(records)} records is long enough for a prompt of {fewest} to {most} tokens"
        )
    return found


def chat_tokens(
    messages: Chat,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    add_generation_prompt: bool = False,
) -> list[int]:
    """Return the token ids of a chat; ``where`` names the chat in error messages.

    Raises:
        ValueError: for a tokenizer without a chat template, or a chat that its template refuses.
    """
    return _render(
        messages,
        tokenizer,
        where,
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
    )


def append_turn(texts: list[Transcript], prompt: list[int], answer: list[int]) -> None:
    """Add a turn to the texts of a chat: to the last text if the prompt continues it, else as a new text."""
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
            f"max_length={max_length} leaves no room after the {len(before)} tokens that begin every text"
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
    """Return the tokens that the tokenizer puts before a text, such as the begin-of-sequence token."""
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
    """Tokenize a chat into one or several texts, with the ranges that the assistant wrote."""
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
                f"{where}: the chat template does not show what the assistant wrote, because the chat with "
                f"message {turn + 1} does not begin with the prompt for that message. Use a template with "
                "{% generation %} markers, or let the target write the answers (regenerate)"
            )
        answer = whole[len(prompt) :]
        if tokenizer.eos_token_id in answer:  # the tokens after it belong to the template
            answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
        append_turn(texts, prompt, answer)
    return texts


def _template(tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ValueError(
            f"{where} is a chat, but the target's tokenizer has no chat template; pass plain texts, or set "
            "tokenizer.chat_template"
        ) from error


def _render(messages: Chat, tokenizer: PreTrainedTokenizerBase, where: str, **options: Any) -> Any:
    _template(tokenizer, where)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateError as error:
        raise ValueError(f"{where}: the chat template refuses this chat: {error}") from error
