"""``Service``: what all endpoints share: the engine, its tokenizer, the limits and the counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from specdec_ext.defaults import MAX_BODY_BYTES
from specdec_ext.engine import AnyEngine
from specdec_ext.rollout.lock import PairLock, ReferenceAcceptance
from specdec_ext.serve.http.errors import ApiError, shown
from specdec_ext.serve.metrics import ServerMetrics
from specdec_ext.serve.structured import Grammars
from specdec_ext.serve.text.logprobs import Texts
from specdec_ext.serve.text.replies import response_template

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The options of ``specdec serve`` that endpoints read.

    Attributes:
        model_name: the name under which clients ask for the model.
        chat_template: a Jinja template in place of the tokenizer's; None keeps that one.
        api_key: the key that clients must send; None for none.
        max_body_bytes: the most bytes of the body of a request.
        request_timeout: the most seconds that a request may take, waiting included.
        reference: the acceptance in the lock of the pair, for the metrics; None without a lock.
        pair: returns the lock of target and draft, by hashing their files; None if they are not known.
    """

    model_name: str
    chat_template: str | None = None
    api_key: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    request_timeout: float = 600.0
    reference: ReferenceAcceptance | None = None
    pair: Callable[[], PairLock] | None = None


class Service:
    """An engine and what it takes to answer requests with it.

    Args:
        engine: the engine; it has a tokenizer.
        settings: the options of the server.

    Attributes:
        ends: the end-of-sequence ids of the model.
    """

    def __init__(self, engine: AnyEngine, settings: Settings):
        self.engine, self.settings = engine, settings
        self.tokenizer: Any = engine.tokenizer
        model: Any = engine.model
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        ends = model.generation_config.eos_token_id
        self.ends: list[int] = [] if ends is None else ends if isinstance(ends, list) else [ends]
        # What the checkpoint recommends; OpenAI's defaults hold for the rest.
        self.recommended: dict[str, Any] = model.generation_config.to_diff_dict()
        self.metrics = ServerMetrics(engine, settings.model_name, settings.reference)
        self.grammars = Grammars(self.tokenizer, self.vocab_size, self.ends)
        self.texts = Texts(self.tokenizer)
        self.template = response_template(model, self.tokenizer)
        self._pair: dict[str, Any] | None = None
        self._hashing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "specdec-tokenizer")

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that takes long (templates, long prompts) without holding up other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def pair(self) -> dict[str, Any]:
        """The lock of target and draft as JSON; files are hashed at the first call."""
        async with self._hashing:  # a client that asks again while they are hashed waits, too
            if self._pair is None:
                try:
                    if self.settings.pair is None:
                        raise ValueError("the server was made without the places of their files")
                    self._pair = (await asyncio.to_thread(self.settings.pair)).record()
                except (OSError, ValueError) as error:
                    raise ApiError(404, f"target and draft have no lock: {error}") from error
            return self._pair

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model."""
        served = self.settings.model_name
        if name is not None and name != served:
            raise ApiError(
                404,
                f"model: this server has the model {served!r}, got {shown(name)}",
                "model",
                "model_not_found",
            )

    def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """The ids of a text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(400, f"{param}: expected valid Unicode, got {error}", param) from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def check_ids(self, ids: list[int], param: str) -> None:
        """Refuse ids that the model does not have."""
        largest = max(ids, default=0)
        if largest >= self.vocab_size:
            raise ApiError(
                400, f"{param}: expected token ids in [0, {self.vocab_size}), got {largest}", param
            )

    def room(self, prompt: list[int], asked: int | None, param: str) -> int:
        """The largest number of new tokens after a prompt; all that fit, if the request does not say."""
        limit = self.engine.max_length
        left = limit - len(prompt)
        if not prompt:
            raise ApiError(400, f"{param}: expected at least one token, got none", param)
        if left < max(1, asked or 1):
            wanted = "" if asked is None else f", and {asked} more were asked for"
            raise ApiError(
                400,
                f"{param}: a text may have {limit} tokens; the prompt has {len(prompt)}{wanted}. "
                "Shorten the prompt, or ask for fewer tokens",
                param,
                "context_length_exceeded",
            )
        return left if asked is None else asked
