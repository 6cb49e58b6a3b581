"""Conversations from files, and the questions that a benchmark asks: every turn of every conversation.

Supported files, in UTF-8: a ``.jsonl`` file with one prompt per line, a ``.json`` list of prompts, and any
other file as a single prompt. A prompt is a text or an object. The files of MT-bench (Zheng et al. 2023),
of Spec-Bench (Xia et al. 2024), and HumanEval and GSM8K in Spec-Bench's form have the fields ``question_id``,
``category`` and ``turns``. Texts may also stand under ``prompt`` (HumanEval's own file, with ``task_id``) or
``question`` (GSM8K's own file).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_ext import assets
from specdec_ext.display.progress import tracked
from specdec_ext.heads.checkpoints.config.fields import shown
from specdec_ext.training.data.records import checked_text, read_rows, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT_FIELDS = ("prompt", "question")
_NAME_FIELDS = ("name", "question_id", "task_id")

# Answers the messages so far, the last one being the user's; None if there is no answer.
Answerer = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Conversation:
    """The user's side of a conversation.

    Attributes:
        name: its name in the file, else its number.
        turns: what the user says, one text per turn.
        category: its category; "" if the file names none.
        is_chat: whether the file gives turns, that is, questions to a model that chats; False for a text to
            be continued.
    """

    name: str
    turns: tuple[str, ...]
    category: str = ""
    is_chat: bool = False


@dataclass(frozen=True)
class Question:
    """One turn of a conversation, with what was said before it.

    Attributes:
        name: name of the conversation, and the turn if it is not the first.
        category: as for :class:`Conversation`.
        messages: texts of user and model in turn; the last one is the user's.
        is_chat: as for :class:`Conversation`.
    """

    name: str
    category: str
    messages: tuple[str, ...]
    is_chat: bool = False

    @property
    def chat(self) -> list[dict[str, str]]:
        """The messages with their roles."""
        roles = ("user", "assistant")
        return [
            {"role": roles[number % 2], "content": text}
            for number, text in enumerate(self.messages)
        ]

    @property
    def text(self) -> str:
        """The messages as a text to be continued, for models without a chat template."""
        return "\n\n".join(self.messages)


def general() -> list[Conversation]:
    """The bundled prompts for models of any kind, with categories and second turns."""
    return read_conversations(assets.FOLDER / "general_prompts.jsonl")


def bundled() -> list[Conversation]:
    """The bundled prompts for the bundled model."""
    return [Conversation(each["name"], (each["prompt"],)) for each in assets.held_out_prompts()]


def read_conversations(path: Path) -> list[Conversation]:
    """Read the prompts of a file.

    Raises:
        ValueError: if the file is empty or has another content; the message names file and line.
        OSError: if it can't be read.
    """
    listed = path.suffix in (".json", ".jsonl")
    rows = read_rows(path) if listed else [(str(path), read_text(path))]
    if not rows:
        raise ValueError(f"{path} is empty; expected a list of prompts")
    return [_conversation(row, where, str(i)) for i, (where, row) in enumerate(rows)]


def _conversation(row: Any, where: str, default_name: str) -> Conversation:
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a text or an object, got {type(row).__name__}")
    field = next((name for name in _TEXT_FIELDS if name in row), None)
    turns = row.get("turns") if field is None else [row[field]]
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn for turn in turns)
    ):
        raise ValueError(
            f"{where}: expected a text under 'prompt' or 'question', or a list of texts under 'turns'"
        )
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        raise ValueError(f"{where}: category is {shown(category)}; expected a text")
    name = next((row[name] for name in _NAME_FIELDS if name in row), default_name)
    texts = tuple(checked_text(turn, f"{where}: the prompt") for turn in turns)
    return Conversation(str(name), texts, category or "", field is None)


def chosen(
    conversations: Sequence[Conversation],
    categories: Sequence[str] = (),
    count: int | None = None,
    turns: int | None = None,
) -> list[Conversation]:
    """Select conversations, and order them by category.

    Args:
        conversations: all that the file has.
        categories: those to keep; () keeps all.
        count: most conversations to keep, from all categories alike and the first ones of each; None keeps
            all.
        turns: most turns of each; None keeps all.

    Raises:
        ValueError: for a category that no conversation has.
    """
    by_category: dict[str, list[Conversation]] = {}
    for each in conversations:
        by_category.setdefault(each.category, []).append(each)
    for category in categories:
        if category not in by_category:
            known = ", ".join(filter(None, by_category)) or "none"
            raise ValueError(f"--category {category}: no prompt has it; categories are {known}")
    kept = [by_category[name] for name in by_category if not categories or name in categories]
    if count is not None:
        places = sorted(
            (place, number) for number, part in enumerate(kept) for place in range(len(part))
        )
        numbers = [number for _, number in places[:count]]
        kept = [part[: numbers.count(number)] for number, part in enumerate(kept)]
    return [replace(each, turns=each.turns[:turns]) for part in kept for each in part]


def questions(
    conversations: Sequence[Conversation], answer: Answerer
) -> tuple[list[Question], list[str]]:
    """Every turn of every conversation, after the answers to the turns before it.

    All contestants are asked the same questions, so the answers are those of one model or server.

    Args:
        answer: called for each turn that another one follows.

    Returns:
        The questions, and the names of the conversations whose later turns are missing, because an earlier
        one had no answer.
    """
    found, cut = [], []
    with tracked("answering", sum(len(each.turns) - 1 for each in conversations), "turn") as work:
        for each in conversations:
            messages: list[str] = []
            for number, turn in enumerate(each.turns, 1):
                messages.append(turn)
                name = each.name if number == 1 else f"{each.name}, turn {number}"
                found.append(Question(name, each.category, tuple(messages), each.is_chat))
                if number < len(each.turns):
                    reply = answer(messages)
                    work.advance()
                    if reply is None:
                        cut.append(each.name)
                        break
                    messages.append(reply)
    return found, cut


def takes_chats(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, chat: bool | None
) -> bool:
    """Whether questions become prompts by the tokenizer's chat template.

    Args:
        chat: what the user wants; None for the template if there is one and all conversations are chats.

    Raises:
        ValueError: if the user wants it and there is no template.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has_template:
        raise ValueError("--chat: the model's tokenizer has no chat template; pass --no-chat")
    if chat is None:
        return has_template and all(each.is_chat for each in conversations)
    return chat


def rendered(question: Question, tokenizer: PreTrainedTokenizerBase, chat: bool) -> str:
    """The text of a question for a model, by the chat template or as it is.

    Raises:
        ValueError: if the template refuses the messages.
    """
    if not chat:
        return question.text
    try:
        text = tokenizer.apply_chat_template(
            question.chat, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # templates raise what they like
        raise ValueError(
            f"prompt {question.name}: the chat template refuses it ({error}); pass --no-chat"
        ) from error
    assert isinstance(text, str)
    return text
