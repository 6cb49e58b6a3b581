"""``regenerate``: let the target write the answers that a head is trained on.

A head drafts what the target would write, so it should learn from the target's own text instead of the data's
(EAGLE-3 and its successors regenerate the answers of their data). Prompts come from the data
(:func:`specdec_ext.training.data.examples.prompts`): pieces of texts, and chats whose assistant turns are
written again, turn by turn.

The answers are written to a file as they are generated, one line per text.
:func:`specdec_ext.training.data.records.read_records` reads that file. An interrupted run can be continued,
and prompts may be added later. A sampled answer also depends on its row in the batch, like the noise, so a
continued run may sample other answers than an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_ext.display.progress import tracked
from specdec_ext.generation import generate
from specdec_ext.models.passes.prompt import left_padded
from specdec_ext.preflight.inputs import regular_file
from specdec_ext.training.data.batches import Example
from specdec_ext.training.data.examples import append_turn, chat_tokens
from specdec_ext.training.data.fingerprint import fingerprint
from specdec_ext.training.data.records import Chat, Transcript, transcript

_log = logging.getLogger(__name__)


def regenerate(
    target: PreTrainedModel,
    prompts: Sequence[Tensor | Chat],
    cache_file: str | Path,
    *,
    max_new_tokens: int,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    temperature: float = 0.0,
    batch: int = 32,
    seed: int = 0,
    drafter: Any = None,
) -> list[Example]:
    """Let the target answer prompts; return prompts with answers, in their order.

    The loss masks are True on the answers. The target's generation config applies, except for sampling, which
    is greedy or plain sampling at ``temperature``.

    Args:
        target: the model that writes the answers.
        prompts: token ids ``[length]`` to continue, or chats. In a chat, the assistant's messages are
            removed, and the target answers each run of the other messages. A chat ends after an answer that
            reached ``max_new_tokens``. One chat may give several texts
            (:mod:`specdec_ext.training.data.examples`).
        cache_file: file of the answers (JSON lines); it must not hold answers of another target.
        max_new_tokens: the most tokens of one answer.
        max_length: the most tokens of a text; a turn without room for a whole answer is not answered.
        tokenizer: the target's tokenizer with its chat template; required for chats.
        temperature: 0 is greedy.
        batch: number of prompts per batch; prompts of similar length are batched together.
        seed: seed of the sampling and of the order of batches.
        drafter: as in :func:`specdec_ext.generate`. For large batches plain decoding is often the fastest.

    Raises:
        ValueError: for numbers out of range, prompts that the target can't read, chats without a tokenizer or
            chat template, if all prompts are too long, or for a damaged line of ``cache_file`` or one of
            another target.
        OSError: for a file that can't be written.
    """
    writer = _Writer(target, tokenizer, max_new_tokens, max_length, temperature, seed, drafter)
    if batch < 1:
        raise ValueError(f"batch is {batch}; expected at least 1")
    if not prompts:
        raise ValueError("prompts is empty; expected at least one prompt")
    for number, prompt in enumerate(prompts, 1):
        writer.check(prompt, f"prompt {number}")
    keys = _distinct([writer.key(prompt) for prompt in prompts])
    path = Path(cache_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _kept(path, writer.name)
    todo = [index for index, key in enumerate(keys) if key not in done]
    finished, tokens = len(keys) - len(todo), 0
    _log.info("%s has the answers to %d of %d prompts", path, finished, len(keys))
    with (
        path.open("a", encoding="utf-8") as file,
        tracked("the target writes answers", len(keys), "prompt", finished) as work,
    ):
        for indices in _batches([_size(prompt) for prompt in prompts], todo, batch, seed):
            chosen = [keys[index] for index in indices]
            made = writer.answer([prompts[index] for index in indices], chosen)
            for key, texts in zip(chosen, made, strict=True):
                done[key] = texts
                file.writelines(_line(writer.name, key, texts))
                tokens += sum(end - start for text in texts for start, end in text.answers)
            file.flush()
            os.fsync(file.fileno())
            finished += len(indices)
            work.update(finished, f"{tokens:,} tokens")
    unanswered = sum(not done[key] for key in keys)
    if unanswered == len(keys):
        raise ValueError(
            f"none of the {len(keys)} prompts leaves room for an answer with max_length={max_length} and "
            f"max_new_tokens={max_new_tokens}; pass shorter prompts, or a larger max_length"
        )
    if unanswered:
        warnings.warn(
            f"{unanswered} of {len(keys)} prompts are left out, because they leave no room for an answer "
            f"with max_length={max_length} and max_new_tokens={max_new_tokens}",
            stacklevel=2,
        )
    return [text.example() for key in keys for text in done[key]]


class _Dialogue:
    """A prompt that is being answered: a text has one turn, a chat one for each run of questions.

    Attributes:
        texts: the texts written so far.
    """

    def __init__(self, prompt: Tensor | Chat, key: str):
        self.texts: list[Transcript] = []
        self._key = key
        self._history: Chat = []
        self._turns: list[Any] = (
            [prompt.tolist()] if isinstance(prompt, Tensor) else _questions(prompt)
        )
        self._turn = 0

    def next_prompt(self, tokenizer: PreTrainedTokenizerBase | None, room: int) -> list[int] | None:
        """Return the token ids of the next turn; None after the last turn, or if it exceeds ``room``."""
        if self._turn == len(self._turns):
            return None
        turn = self._turns[self._turn]
        if tokenizer is not None and isinstance(turn[0], dict):
            self._history += turn
            turn = chat_tokens(self._history, tokenizer, "a chat", add_generation_prompt=True)
        if len(turn) > room:
            self._turn = len(self._turns)
            return None
        self._turn += 1
        return turn

    def seed(self) -> int:
        """Return the seed for the answer to the turn that :meth:`next_prompt` returned last."""
        return int.from_bytes(
            hashlib.sha256(f"{self._key} {self._turn}".encode()).digest()[:4], "big"
        )

    def answered(
        self,
        prompt: list[int],
        answer: list[int],
        finished: bool,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Record the answer to a turn; ``finished`` is False if it was cut off, which ends the dialogue."""
        append_turn(self.texts, prompt, answer)
        if not finished:
            self._turn = len(self._turns)
        elif tokenizer is not None:
            text = str(tokenizer.decode(answer, skip_special_tokens=True))
            self._history.append({"role": "assistant", "content": text})


class _Writer:
    """The target with the settings of a run; arguments as in :func:`regenerate`."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        max_new_tokens: int,
        max_length: int,
        temperature: float,
        seed: int,
        drafter: Any,
    ):
        if max_new_tokens < 1 or max_length <= max_new_tokens:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens} and max_length {max_length}; expected max_new_tokens of "
                "at least 1, and a larger max_length, to leave room for a prompt"
            )
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(
                f"temperature is {temperature}; expected 0, which is greedy, or a positive number"
            )
        self.name = fingerprint(target)
        self._target, self._tokenizer, self._drafter = target, tokenizer, drafter
        self._max_new_tokens, self._max_length = max_new_tokens, max_length
        self._temperature, self._seed = temperature, seed
        config: Any = target.config.get_text_config(decoder=True)
        self._vocab_size = int(config.vocab_size)
        ends = target.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def check(self, prompt: Tensor | Chat, where: str) -> None:
        """Raise ValueError for a prompt that the target can't answer."""
        if isinstance(prompt, Tensor):
            if prompt.ndim != 1 or not len(prompt) or prompt.dtype != torch.int64:
                raise ValueError(
                    f"{where} has shape {list(prompt.shape)} and dtype {prompt.dtype}; expected token ids "
                    "[length], int64"
                )
            if not 0 <= int(prompt.min()) <= int(prompt.max()) < self._vocab_size:
                raise ValueError(
                    f"{where} has token ids {int(prompt.min())} to {int(prompt.max())}, but the target's "
                    f"vocabulary has {self._vocab_size} tokens; use the target's own tokenizer"
                )
        elif self._tokenizer is None:
            raise ValueError(f"{where} is a chat; pass the target's tokenizer as tokenizer=...")
        else:
            questions = _questions(prompt)
            if not questions:
                raise ValueError(
                    f"{where} has no message to answer, because all are the assistant's; leave it out"
                )
            chat_tokens(questions[0], self._tokenizer, where, add_generation_prompt=True)

    def key(self, prompt: Tensor | Chat) -> str:
        """Return a hash of everything that the answer depends on."""
        settings: list[Any] = [self.name, self._max_new_tokens, self._temperature, self._seed]
        if isinstance(prompt, Tensor):
            content: list[Any] = prompt.tolist()
        else:
            content = prompt
            assert self._tokenizer is not None
            settings += [self._max_length, self._tokenizer.get_chat_template()]
        return hashlib.sha256(json.dumps([content, settings]).encode()).hexdigest()[:24]

    def answer(
        self, prompts: Sequence[Tensor | Chat], keys: Sequence[str]
    ) -> list[list[Transcript]]:
        """Answer all turns of some prompts; return the texts of each."""
        dialogues = [_Dialogue(prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
        room = self._max_length - self._max_new_tokens
        while True:
            turns = [(each, each.next_prompt(self._tokenizer, room)) for each in dialogues]
            live = [(each, prompt) for each, prompt in turns if prompt is not None]
            if not live:
                return [dialogue.texts for dialogue in dialogues]
            answers = self._generate([p for _, p in live], [each.seed() for each, _ in live])
            for (dialogue, prompt), answer in zip(live, answers, strict=True):
                dialogue.answered(prompt, answer, answer[-1] in self._ends, self._tokenizer)

    def _generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        tokens, mask = left_padded(prompts, self._target.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if self._temperature:
            sampling = dict(
                do_sample=True, temperature=self._temperature, top_k=0, top_p=1.0, seed=seeds
            )
        output = generate(
            self._target,
            tokens,
            attention_mask=mask,
            max_new_tokens=self._max_new_tokens,
            drafter=self._drafter,
            **sampling,
        )
        assert isinstance(output, Tensor)
        return [self._cut(answer) for answer in output[:, tokens.shape[1] :].tolist()]

    def _cut(self, answer: list[int]) -> list[int]:
        """Cut the padding after the end of a row that ended early."""
        end = next((i for i, token in enumerate(answer) if token in self._ends), len(answer))
        return answer[: end + 1]


def _questions(chat: Chat) -> list[Chat]:
    """Return the runs of consecutive messages that are not the assistant's."""
    runs = groupby(chat, key=lambda message: message["role"] == "assistant")
    return [list(run) for by_assistant, run in runs if not by_assistant]


def _size(prompt: Tensor | Chat) -> int:
    """Return the number of tokens, or of characters of a chat, by which prompts are batched."""
    if isinstance(prompt, Tensor):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt)


def _batches(sizes: list[int], todo: list[int], batch: int, seed: int) -> list[list[int]]:
    """Batch the indices ``todo`` by similar size; the batches are in random order.

    Any part of the file is then a representative sample, and the remaining time can be estimated.
    """
    ordered = sorted(todo, key=lambda index: sizes[index])
    batches = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    return [batches[index] for index in np.random.default_rng(seed).permutation(len(batches))]


def _distinct(keys: list[str]) -> list[str]:
    """Append a counter to each key, so that a prompt that is given twice is answered twice."""
    seen: Counter[str] = Counter()
    numbered = []
    for key in keys:
        numbered.append(f"{key}-{seen[key]}")
        seen[key] += 1
    return numbered


def _line(name: str, key: str, texts: list[Transcript]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        record: dict[str, Any] = {
            "target": name,
            "prompt": key,
            "part": [number, len(texts)],
            "tokens": text.tokens,
            "answers": text.answers,
        }
        yield json.dumps(record, separators=(",", ":")) + "\n"


def _kept(path: Path, name: str) -> dict[str, list[Transcript]]:
    """Read the texts of all completely answered prompts; the incomplete end of an interrupted run is cut."""
    done: dict[str, list[Transcript]] = {}
    texts: list[Transcript] = []
    whole = position = 0
    if not path.exists():
        return done
    with regular_file(path, "a file that regenerate wrote").open("rb") as file:
        for number, line in enumerate(file, 1):
            position += len(line)
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                of_target, key, (part, parts) = record["target"], record["prompt"], record["part"]
                text = transcript(record, f"{path} line {number}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{path} line {number} is damaged ({error}); delete the line, or pass another cache_file"
                ) from error
            if of_target != name:
                raise ValueError(
                    f"{path} has answers of another target ({of_target}, but this one is {name}); pass "
                    "another cache_file"
                )
            texts = [*texts[: part - 1], text]
            if part == parts:
                done[key], texts, whole = texts, [], position
    if whole < path.stat().st_size:
        os.truncate(path, whole)
    return done
