"""The bodies of requests. A field that is not listed here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

# Fields of OpenAI's API that say nothing about the text: who asks, how it is billed, stored or cached.
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction"),
    }
)
MOST_CHOICES = 128
LARGEST_SEED = 2**63 - 1

Int: TypeAlias = Annotated[int, Field(strict=True)]
Float: TypeAlias = Annotated[float, Field(strict=True)]
Bool: TypeAlias = Annotated[bool, Field(strict=True)]
TokenId: TypeAlias = Annotated[int, Field(strict=True, ge=0)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop: TypeAlias = Annotated[
    list[Annotated[str, StringConstraints(min_length=1)]],
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    Field(max_length=64),
]


class Body(BaseModel):
    """A JSON object in which null means that the field is missing."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
        include_usage: a last chunk without choices has the usage.
        continuous_usage_stats: every chunk has the usage so far.
    """

    include_usage: Bool = False
    continuous_usage_stats: Bool = False


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Bool = True


class ResponseFormat(Body):
    """The form that a text must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required with type 'json_schema', and with no other")
        return self


class Generation(Body):
    """What chat completions and completions have in common; see docs/guide/serve.md for the meanings."""

    model: str | None = None
    stream: Bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[Int, Field(ge=1, le=MOST_CHOICES)] = 1
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] = 0
    temperature: Annotated[Float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[Float, Field(ge=-100, le=100)]] = {}
    seed: Annotated[Int, Field(ge=-(2**63), le=LARGEST_SEED)] | None = None
    stop: Stop = []
    ignore_eos: Bool = False
    skip_special_tokens: Bool = True
    response_format: ResponseFormat | None = None
    speculation: Literal["auto", "fixed", "none"] | None = None
    mark_drafted: Bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_harmless(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name not in HARMLESS}

    @field_validator("temperature")
    @classmethod
    def _not_tiny(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 0.01:
            raise ValueError("expected 0 for greedy decoding, or at least 0.01")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _of_ids(cls, value: dict[str, float]) -> dict[str, float]:
        if not all(name.isascii() and name.isdigit() for name in value):
            raise ValueError("expected token ids as names")
        return value

    @model_validator(mode="after")
    def _fit_each_other(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream=true only")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens mean the same; pass one of them")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The most new tokens for each choice, by either name; None if the request does not say."""
        return self.max_completion_tokens or self.max_tokens


class TextPart(Body):
    type: str
    text: str | None = None

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _is_text(self) -> TextPart:
        if self.type != "text":
            raise ValueError(f"only parts of type 'text' are supported, got {self.type[:40]!r}")
        if self.text is None or self.model_extra:
            raise ValueError("a part of type 'text' has the field 'text', and no other")
        return self


class FunctionCall(Body):
    name: str
    arguments: str = "{}"


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Body):
    """A message of a chat. The content is a text, or a list of parts of type text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart],
        BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart]),
    ] = []
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if not self.content and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required, except with the tool_calls of an assistant")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belongs to messages of the role 'assistant'")
        return self

    @property
    def text(self) -> str:
        """The parts, one per line."""
        return "\n".join(part.text or "" for part in self.content)


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: Bool = False


class Tool(Body):
    type: Literal["function"]
    function: Function


class Prompted(Body):
    """What decides how the messages of a chat become a prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, Any] = {}


class ChatRequest(Generation, Prompted):
    """The body of ``POST /v1/chat/completions``."""

    logprobs: Bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _not_forced(cls, value: Any) -> Any:
        if value not in ("auto", "none"):
            raise ValueError("calls of a tool can't be forced; expected 'auto' or 'none'")
        return value

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


def _as_prompts(value: Any) -> Any:
    """A text, a list of ids, or a list of these -> a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
        return [value]
    return value


def _checked_prompt(value: Any) -> Any:
    ids = (
        isinstance(value, list) and value and all(type(each) is int and each >= 0 for each in value)
    )
    if not ids and not (isinstance(value, str) and value):
        raise ValueError("expected a text or a list of token ids that is not empty")
    return value


Prompt: TypeAlias = Annotated[
    Any,
    BeforeValidator(_checked_prompt, json_schema_input_type=str | list[TokenId]),
]


class CompletionRequest(Generation):
    """The body of ``POST /v1/completions``. The prompt is a text, a list of ids, or a list of these."""

    prompt: Annotated[
        list[Prompt],
        BeforeValidator(
            _as_prompts,
            json_schema_input_type=str | list[TokenId] | list[str] | list[list[TokenId]],
        ),
        Field(min_length=1, max_length=MOST_CHOICES),
    ]
    add_special_tokens: Bool = True
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    echo: Bool = False
    best_of: Int | None = None
    suffix: str = ""

    @field_validator("echo")
    @classmethod
    def _no_echo(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "the prompt can't be returned; expected false. The client has the prompt"
            )
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str) -> str:
        if value:
            raise ValueError("a text can't be inserted before a suffix; leave it out")
        return value

    @model_validator(mode="after")
    def _all_are_returned(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of: texts are not ranked; leave it out, and ask for n texts")
        if self.n * len(self.prompt) > MOST_CHOICES:
            raise ValueError(f"n texts for each prompt: expected at most {MOST_CHOICES} together")
        return self


class TokenizeRequest(Body):
    """The body of ``POST /tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: Bool | None = None
    return_token_strs: Bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("expected either prompt or messages")
        if self.messages and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is for prompt; a chat template writes its own")
        return self


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
