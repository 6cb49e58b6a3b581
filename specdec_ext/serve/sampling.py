"""From the fields of a request to the arguments of ``Engine.submit``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec_ext.serve.http.errors import ApiError
from specdec_ext.serve.http.schemas import LARGEST_SEED, Generation, ResponseFormat
from specdec_ext.serve.service import Service
from specdec_ext.verify.penalties import OccurrencePenalties


@dataclass(frozen=True)
class Wanted:
    """The arguments of ``Engine.submit`` for one choice.

    Attributes:
        prompt: ids of the prompt.
        arguments: the other arguments.
    """

    prompt: list[int]
    arguments: dict[str, Any]


def wanted(
    service: Service,
    body: Generation,
    prompts: Sequence[list[int]],
    max_tokens: int | None,
    param: str,
) -> list[Wanted]:
    """The choices of a request: ``n`` for each prompt, in the order of the prompts.

    Args:
        max_tokens: the most new tokens for each choice; None for as many as fit.
        param: the field of the prompts, for messages.

    Raises:
        ApiError: a prompt does not fit, or a field can't be honoured.
    """
    rooms = [service.room(prompt, max_tokens, param) for prompt in prompts]
    return [
        Wanted(prompt, {**_arguments(service, body, prompt, room), "seed": _seed(body, number)})
        for prompt, room in zip(prompts, rooms, strict=True)
        for number in range(body.n)
    ]


def _arguments(
    service: Service, body: Generation, prompt: list[int], max_new: int
) -> dict[str, Any]:
    """The arguments of one choice, without its seed.

    What the request leaves open is as the checkpoint's generation config recommends, else as OpenAI's API
    defines it: temperature 1, and no filter.
    """

    def chosen(name: str, neutral: Any) -> Any:
        value = getattr(body, name)
        return service.recommended.get(name, neutral) if value is None else value

    if body.min_tokens > max_new:
        raise ApiError(
            400,
            f"min_tokens: expected at most {max_new} (max_tokens), got {body.min_tokens}",
            "min_tokens",
        )
    given: dict[str, Any] = {
        "max_new_tokens": max_new,
        "min_new_tokens": body.min_tokens or None,
        "repetition_penalty": chosen("repetition_penalty", 1.0),
        "sequence_bias": _bias(service, body.logit_bias),
        "logits_processor": _processors(service, body, len(prompt)),
    }
    temperature = chosen("temperature", 1.0)
    given["do_sample"] = temperature > 0
    if temperature > 0:
        given |= {
            "temperature": temperature,
            "top_p": chosen("top_p", 1.0),
            "top_k": max(0, chosen("top_k", 0)),
            "min_p": chosen("min_p", 0.0) or None,
        }
    if body.ignore_eos:
        given["eos_token_id"] = None
    if body.speculation == "none":
        given["drafter"] = None
    elif body.speculation is not None:
        given["speculation"] = body.speculation
    return given


def _seed(body: Generation, number: int) -> int | None:
    """The seed of a choice: that of the request plus the number of the choice, so that choices differ."""
    if body.seed is None:
        return None
    seed = body.seed + number
    return seed if seed <= LARGEST_SEED else seed - 2**64


def _bias(service: Service, biases: dict[str, float]) -> list[list[Any]] | None:
    for name in biases:
        if int(name) >= service.vocab_size:
            raise ApiError(
                400,
                f"logit_bias: expected token ids in [0, {service.vocab_size}), got {name[:20]}",
                "logit_bias",
            )
    return [[[int(name)], float(value)] for name, value in biases.items()] or None


def _processors(service: Service, body: Generation, prompt_columns: int) -> list[Any] | None:
    found: list[Any] = []
    presence, frequency = body.presence_penalty, body.frequency_penalty
    if presence or frequency:
        found.append(OccurrencePenalties(presence, frequency, prompt_columns))
    schema = _schema(body.response_format)
    if schema is not None:
        if body.ignore_eos:
            raise ApiError(
                400,
                "ignore_eos: a text with a response_format ends with it; leave it out",
                "ignore_eos",
            )
        try:
            found.append(service.grammars.processor(schema, prompt_columns))
        except (ImportError, ValueError) as error:
            raise ApiError(400, f"response_format: {error}", "response_format") from error
    return found or None


def _schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    return {"type": "object"} if form.json_schema is None else form.json_schema.schema_
