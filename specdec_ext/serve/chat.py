"""``POST /v1/chat/completions``: replies to the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from specdec_ext.serve.answer import Answer
from specdec_ext.serve.http.errors import ApiError
from specdec_ext.serve.http.schemas import ChatRequest, Message, Tool
from specdec_ext.serve.sampling import Wanted, wanted
from specdec_ext.serve.service import Service
from specdec_ext.serve.text.choice import Choice, Piece
from specdec_ext.serve.text.logprobs import Scored, chat_logprobs
from specdec_ext.serve.text.marks import Marks, Part, append
from specdec_ext.serve.text.replies import Reply

CHUNK = "chat.completion.chunk"  # the value of ``object`` in a stream


class ChatAnswer:
    """A reply that was submitted.

    Args:
        answer: its choices.
        body: the request.
        prompt: ids of the prompt.
        tools: the tools that the prompt describes.
    """

    def __init__(self, answer: Answer, body: ChatRequest, prompt: list[int], tools: list[Any]):
        self.answer, self._body = answer, body
        service = answer.service
        self._replies = [
            Reply(service.tokenizer, service.template, prompt, tools) for _ in answer.choices
        ]
        self._marks = [Marks() for _ in answer.choices]

    async def whole(self) -> str:
        """The answer as one JSON text."""
        answer = self.answer
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": None} for _ in answer.choices
        ]
        scored: list[list[Any]] = [[] for _ in answer.choices]
        marked: list[list[Part]] = [[] for _ in answer.choices]
        async with aclosing(answer.pieces()) as pieces:
            async for choice, piece in pieces:
                scored[choice.index] += piece.logprobs
                for delta in self._deltas(choice, piece):
                    _extend(messages[choice.index], delta)
                    for part in self._pieces(choice, delta):
                        append(marked[choice.index], part)
        choices: list[dict[str, Any]] = []
        for choice, message, logprobs in zip(answer.choices, messages, scored, strict=True):
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs(logprobs),
                    "finish_reason": self._reason(choice),
                }
            )
            if self._body.mark_drafted:
                choices[-1]["pieces"] = marked[choice.index]
        return answer.told("chat.completion", choices, usage=answer.usage, **answer.metrics)

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The answer as the JSON texts of a stream."""
        answer, options = self.answer, self._body.stream_options
        wants_usage = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        unfinished = len(answer.choices)
        begun: set[Choice] = set()

        def chunk(choice: Choice, delta: dict[str, Any], scored: Scored, reason: str | None) -> str:
            if choice not in begun:
                begun.add(choice)
                delta = {"role": "assistant", "content": "", **delta}
            told: dict[str, Any] = {
                "index": choice.index,
                "delta": delta,
                "logprobs": self._logprobs(scored),
                "finish_reason": reason,
            }
            if self._body.mark_drafted:
                told["pieces"] = self._pieces(choice, delta)
            is_end = reason is not None and not unfinished and not wants_usage
            extra = answer.metrics if is_end else {}
            return answer.told(CHUNK, [told], usage=answer.usage if always else None, **extra)

        async with aclosing(answer.pieces()) as pieces:
            async for choice, piece in pieces:
                unfinished -= piece.is_last
                scored: Scored = piece.logprobs
                deltas = self._deltas(choice, piece)
                if scored and not deltas:
                    deltas = [{"content": ""}]
                for delta in deltas:
                    yield chunk(choice, delta, scored, None)
                    scored = []
                if piece.is_last:
                    yield chunk(choice, {}, scored, self._reason(choice))
        if wants_usage:
            yield answer.told(CHUNK, [], usage=answer.usage, **answer.metrics)

    def _deltas(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        reply = self._replies[choice.index]
        if self._body.mark_drafted:
            self._marks[choice.index].add(piece.parts)
        deltas = reply.feed(piece.text) if piece.parts else []
        return deltas + reply.flush() if piece.is_last else deltas

    def _pieces(self, choice: Choice, delta: dict[str, Any]) -> list[Part]:
        """The parts of the content of a delta."""
        marks = self._marks[choice.index]
        marks.take(delta.get("reasoning_content", ""))  # it is told first, and has no marks
        return marks.take(delta.get("content", ""))

    def _reason(self, choice: Choice) -> str | None:
        is_call = choice.finish_reason == "stop" and self._replies[choice.index].has_called
        return "tool_calls" if is_call else choice.finish_reason

    def _logprobs(self, scored: Scored) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        count = self._body.top_logprobs or 0
        return {"content": chat_logprobs(self.answer.service.texts, scored, count)}


async def start(service: Service, body: ChatRequest) -> ChatAnswer:
    """Submit the request.

    Raises:
        ApiError: it is refused.
    """
    service.check_model(body.model)
    tools = body.tools if body.tool_choice == "auto" else []

    def prepared() -> tuple[list[int], list[Wanted]]:
        prompt = prompt_of(service, body.messages, tools, body.chat_template_kwargs)
        return prompt, wanted(service, body, [prompt], body.most_tokens, "messages")

    prompt, choices = await service.aside(prepared)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    parsed = service.template is not None
    answer = Answer(service, body, "chatcmpl", choices, len(prompt), logprobs, parsed)
    return ChatAnswer(answer, body, prompt, [tool.model_dump() for tool in tools])


def prompt_of(
    service: Service, messages: list[Message], tools: list[Tool], options: dict[str, Any]
) -> list[int]:
    """The ids of a chat, by the chat template.

    Raises:
        ApiError: there is no template, or it refuses the messages.
    """
    template = service.settings.chat_template
    if template is None and getattr(service.tokenizer, "chat_template", None) is None:
        raise ApiError(
            400,
            "messages: the model has no chat template; use /v1/completions, or start the server with "
            "--chat-template FILE",
            "messages",
            "no_chat_template",
        )
    taken = {"conversation", "tokenize", "add_generation_prompt", "chat_template", "tools"}
    if refused := sorted(taken & options.keys()):
        raise ApiError(
            400,
            f"chat_template_kwargs: {refused[0]} is chosen by the server; leave it out",
            "chat_template_kwargs",
        )
    chat = [_as_template_expects(i, message) for i, message in enumerate(messages)]
    try:
        text = service.tokenizer.apply_chat_template(
            chat,
            tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
            **options,
        )
    except Exception as error:  # templates raise what they like
        raise ApiError(
            400, f"messages: the chat template refuses these messages: {error}", "messages"
        ) from error
    return service.encode(text, False, "messages")  # the template writes special tokens itself


def _as_template_expects(index: int, message: Message) -> dict[str, Any]:
    """A message as chat templates know it: one text, and arguments of tool calls as objects."""
    role = "system" if message.role == "developer" else message.role
    told: dict[str, Any] = {"role": role, "content": message.text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            told[name] = getattr(message, name)
    calls = []
    for i, call in enumerate(message.tool_calls):
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError as error:
            param = f"messages.{index}.tool_calls.{i}.function.arguments"
            raise ApiError(400, f"{param}: expected JSON, got {error}", param) from error
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return {**told, "tool_calls": calls} if calls else told


def _extend(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta of a stream to a whole message."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = [{key: call[key] for key in ("id", "type", "function")} for call in value]
            message[name] = message.get(name, []) + calls
        else:
            message[name] = (message.get(name) or "") + value
