"""``POST /v1/completions``: texts that continue prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from specdec_ext.serve.answer import Answer
from specdec_ext.serve.http.schemas import CompletionRequest
from specdec_ext.serve.sampling import Wanted, wanted
from specdec_ext.serve.service import Service
from specdec_ext.serve.text.choice import Choice, Piece
from specdec_ext.serve.text.logprobs import completion_logprobs
from specdec_ext.serve.text.marks import append

# OpenAI's default for max_tokens of this endpoint.
DEFAULT_MAX_TOKENS = 16
KIND = "text_completion"  # the value of ``object``


class CompletionAnswer:
    """Completions that were submitted.

    Args:
        answer: the choices.
    """

    def __init__(self, answer: Answer):
        self.answer = answer

    async def whole(self) -> str:
        """The answer as one JSON text."""
        answer = self.answer
        wholes = [Piece(is_last=True) for _ in answer.choices]
        async with aclosing(answer.pieces()) as pieces:
            async for choice, piece in pieces:
                for part in piece.parts:
                    append(wholes[choice.index].parts, part)
                wholes[choice.index].logprobs += piece.logprobs
        choices = [
            _choice(answer, choice, whole, 0)
            for choice, whole in zip(answer.choices, wholes, strict=True)
        ]
        return answer.told(KIND, choices, usage=answer.usage, **answer.metrics)

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The answer as the JSON texts of a stream."""
        answer = self.answer
        options = answer.body.stream_options
        wants_usage = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        offsets = [0] * len(answer.choices)
        unfinished = len(answer.choices)
        async with aclosing(answer.pieces()) as pieces:
            async for choice, piece in pieces:
                unfinished -= piece.is_last
                if not (piece.text or piece.logprobs or piece.is_last):
                    continue
                told = _choice(answer, choice, piece, offsets[choice.index])
                offsets[choice.index] += sum(
                    len(answer.service.texts.text(token)) for token, _ in piece.logprobs
                )
                extra = answer.metrics if not unfinished and not wants_usage else {}
                usage = answer.usage if always else None
                yield answer.told(KIND, [told], usage=usage, **extra)
        if wants_usage:
            yield answer.told(KIND, [], usage=answer.usage, **answer.metrics)


async def start(service: Service, body: CompletionRequest) -> CompletionAnswer:
    """Submit the request.

    Raises:
        ApiError: it is refused.
    """
    service.check_model(body.model)
    tokens = body.most_tokens or DEFAULT_MAX_TOKENS

    def prepared() -> tuple[int, list[Wanted]]:
        prompts = [_ids(service, body, prompt) for prompt in body.prompt]
        return sum(map(len, prompts)), wanted(service, body, prompts, tokens, "prompt")

    prompt_tokens, choices = await service.aside(prepared)
    return CompletionAnswer(
        Answer(service, body, "cmpl", choices, prompt_tokens, body.logprobs, parsed=False)
    )


def _ids(service: Service, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return service.encode(prompt, body.add_special_tokens, "prompt")
    service.check_ids(prompt, "prompt")
    return prompt


def _choice(answer: Answer, choice: Choice, piece: Piece, offset: int) -> dict[str, Any]:
    logprobs = None
    if piece.logprobs:
        logprobs = completion_logprobs(answer.service.texts, piece.logprobs, offset)
    told = {
        "index": choice.index,
        "text": piece.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason if piece.is_last else None,
    }
    return {**told, "pieces": piece.parts} if answer.body.mark_drafted else told
