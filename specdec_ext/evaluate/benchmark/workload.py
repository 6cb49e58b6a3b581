"""``Workload``: what all contestants of a report continue, the questions as batches of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedTokenizerBase

from specdec_ext.display.text import counted
from specdec_ext.evaluate.benchmark.contestants import Model, generation_kwargs, ours
from specdec_ext.evaluate.benchmark.prompts import (
    Conversation,
    Question,
    questions,
    rendered,
    takes_chats,
)
from specdec_ext.evaluate.benchmark.series import Prompt
from specdec_ext.models.context_limit import max_positions

AS_TEXTS = "as texts to be continued, without a chat template"
SEVERAL = "several"  # category of a batch whose rows have different ones


@dataclass(frozen=True)
class Workload:
    """Prompts of one batch size, and the temperature at which they are continued.

    Attributes:
        prompts: from :func:`batches`.
        temperature: 0 is greedy.
        names: of the rows of all prompts; () for numbers.
        categories: one per prompt, ``SEVERAL`` if its rows have different ones; () without categories.
        remarks: what else must be known about the prompts.
    """

    prompts: Sequence[Prompt]
    temperature: float = 0.0
    names: Sequence[str] = ()
    categories: Sequence[str] = ()
    remarks: Sequence[str] = ()


def workloads(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    sizes: Iterable[int],
    temperatures: Sequence[float],
    max_new_tokens: int,
    chat: bool | None = None,
) -> list[Workload]:
    """A workload for each batch size and temperature, of the same questions.

    Later turns of a conversation follow the model's own greedy answers, which are generated here, without
    drafts, up to ``max_new_tokens`` or their end.

    Args:
        model: the target.
        conversations: what is asked.
        sizes: batch sizes.
        temperatures: of the sampling; 0 is greedy.
        chat: as for :func:`takes_chats`.

    Raises:
        ValueError: if there are fewer questions than rows in a batch, or no chat template that takes them.
            Questions that exceed the positions of the model do not count.
    """
    takes_chat = takes_chats(conversations, tokenizer, chat)
    plain = ours(model, None, generation_kwargs(max_new_tokens))

    def encoded(texts: Sequence[str], size: int) -> list[Prompt]:
        return batches(tokenizer, texts, size, model.device, not takes_chat)

    limit = max_positions(model.config.get_text_config(decoder=True))

    def fits(text: str) -> bool:
        (prompt,) = encoded([text], 1)
        return limit is None or prompt["input_ids"].shape[1] + max_new_tokens <= limit

    def answer(messages: Sequence[str]) -> str | None:
        text = rendered(Question("", "", tuple(messages)), tokenizer, takes_chat)
        if not fits(text):
            return None
        (prompt,) = encoded([text], 1)
        new = plain(prompt).sequences[0, prompt["input_ids"].shape[1] :]
        answered = tokenizer.decode(new, skip_special_tokens=True)
        assert isinstance(answered, str)  # decode returns a list only for a batch
        return answered

    every, cut = questions(conversations, answer)
    remarks = []
    if any(each.is_chat for each in conversations):
        remarks = ["questions are given " + ("by the chat template" if takes_chat else AS_TEXTS)]
    pairs = [(each, rendered(each, tokenizer, takes_chat)) for each in every]
    fitting = [(each, text) for each, text in pairs if fits(text)]
    asked, texts = [each for each, _ in fitting], [text for _, text in fitting]
    if len(asked) < len(every):
        remarks.append(
            f"{len(every) - len(asked)} of {len(every)} prompts with {max_new_tokens} new tokens exceed the "
            f"{limit} positions of the model; they and {counted(len(cut), 'later turn')} were left out"
        )
    made = []
    for size in sizes:
        prompts = encoded(texts, size)
        used = size * len(prompts)
        unfilled = []
        if used < len(asked):
            unfilled.append(
                f"{len(asked) - used} of {len(asked)} prompts fill no batch of {size} and were left out"
            )
        groups = [asked[start : start + size] for start in range(0, used, size)]
        names = [each.name for each in asked[:used]]
        for temperature in temperatures:
            categories = _categories(groups)
            made.append(Workload(prompts, temperature, names, categories, remarks + unfilled))
    return made


def _categories(groups: Sequence[Sequence[Question]]) -> list[str]:
    if not any(each.category for each in chain(*groups)):
        return []
    found = [{each.category for each in group} for group in groups]
    return [each.pop() if len(each) == 1 else SEVERAL for each in found]


def batches(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    batch: int,
    device: str | torch.device = "cpu",
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """Prompts of ``batch`` texts each, padded on the left; texts that do not fill a batch are left out.

    Raises:
        ValueError: if there are fewer than ``batch`` texts.
    """
    if len(texts) < batch:
        raise ValueError(f"a batch of {batch} needs {batch} prompts, got {len(texts)}")
    if batch > 1:
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    return [
        dict(
            tokenizer(
                list(texts[i : i + batch]),
                return_tensors="pt",
                padding=batch > 1,
                add_special_tokens=add_special_tokens,
            ).to(device)
        )
        for i in range(0, len(texts) - batch + 1, batch)
    ]
