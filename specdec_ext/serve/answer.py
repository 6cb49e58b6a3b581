"""``Answer``: a request that generates text, from its submission to its line in the log."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

from pydantic_core import to_json

from specdec_ext.serve.http.errors import ApiError, as_api_error
from specdec_ext.serve.http.schemas import Generation
from specdec_ext.serve.metrics import Progress
from specdec_ext.serve.sampling import Wanted
from specdec_ext.serve.service import Service
from specdec_ext.serve.text.choice import Choice, Piece, followed
from specdec_ext.stats import SpeculationStats

log = logging.getLogger(__name__)


class Answer:
    """The choices of one request.

    Args:
        service: the server's state.
        body: the request.
        prefix: first part of the answer's id.
        choices: what to submit.
        prompt_tokens: number of tokens of all prompts.
        logprobs: number of most probable tokens; None for no log probabilities.
        parsed: whether the text is parsed, for which it keeps its special tokens.

    Raises:
        ApiError: the engine refuses a choice; nothing runs.
    """

    def __init__(
        self,
        service: Service,
        body: Generation,
        prefix: str,
        choices: Sequence[Wanted],
        prompt_tokens: int,
        logprobs: int | None,
        parsed: bool,
    ):
        self.service, self.body, self.prompt_tokens = service, body, prompt_tokens
        self.id, self.created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self._began = time.perf_counter()
        self._error: ApiError | None = None
        self._is_closed = False
        skip = body.skip_special_tokens and not parsed
        hidden = frozenset(service.ends if parsed else ())
        self.choices: list[Choice] = []
        try:
            for index, each in enumerate(choices):
                handle = service.engine.submit(each.prompt, logprobs=logprobs, **each.arguments)
                self.choices.append(
                    Choice(index, handle, service.tokenizer, body.stop, skip, hidden)
                )
        except Exception as error:
            for choice in self.choices:
                choice.handle.cancel()
            raise as_api_error(error) from error
        self._progress = {choice: Progress() for choice in self.choices}

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """The pieces of all choices.

        Raises:
            ApiError: a choice failed, or time is up.
        """
        timeout = self.service.settings.request_timeout
        left = self._began + timeout - time.perf_counter()
        source = followed(self.choices, self._on_tokens, left, timeout)
        try:
            async with aclosing(source):
                async for item in source:
                    yield item
        except Exception as error:
            self._error = as_api_error(error)
            raise self._error from error

    def close(self) -> None:
        """End the request: cancel what is left of it, count it and log it. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            for choice in self.choices:
                choice.handle.cancel()
            self._count_and_log()

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens so far, as OpenAI's ``CompletionUsage``."""
        new = sum(choice.num_tokens for choice in self.choices)
        # Of a prompt with several choices, its first one counts, as in prompt_tokens.
        firsts = self.choices[:: self.body.n or 1]
        reused = sum(choice.handle.reused_tokens for choice in firsts)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": reused},
        }

    def told(self, kind: str, choices: Sequence[Any], **fields: Any) -> str:
        """An object of the answer as a JSON text.

        Args:
            kind: the value of ``object``.
            choices, **fields: values of JSON, or models of pydantic.
        """
        common = {
            "id": self.id,
            "created": self.created,
            "model": self.service.settings.model_name,
            "object": kind,
            "choices": choices,
        }
        # The models of OpenAI's package take several times as long to build, for every chunk.
        return to_json({**common, **fields}, inf_nan_mode="null").decode()

    @property
    def metrics(self) -> dict[str, Any]:
        """The field ``metrics`` as vLLM sends it: for single choices that were drafted for, else nothing."""
        stats = self.choices[0].handle.stats
        if len(self.choices) > 1 or stats.drafter == "none":
            return {}
        return {"metrics": {"speculative_decoding": speculative_decoding(stats)}}

    def _on_tokens(self, choice: Choice, count: int) -> None:
        self.service.metrics.burst(choice.handle, self._progress[choice], count)

    def _count_and_log(self) -> None:
        unfinished = "abort" if self._error is None else "error"
        reasons = []
        for choice in self.choices:
            reasons.append(choice.finish_reason or unfinished)
            self.service.metrics.ended(choice.handle, choice.num_tokens, reasons[-1])
        total, first = SpeculationStats(), self.choices[0].handle.times
        for choice in self.choices:
            total.add(choice.handle.stats)
        fields: dict[str, Any] = {
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sum(choice.num_tokens for choice in self.choices),
            "finish_reason": ",".join(reasons),
        }
        for name, begin, end in (
            ("queue_ms", first.submitted, first.started),
            ("first_token_ms", first.submitted, first.first_token),
            ("total_ms", self._began, time.perf_counter()),
        ):
            if end is not None:
                fields[name] = round((end - begin) * 1e3, 1)
        if total.drafts:
            fields["acceptance_length"] = round(total.mean_acceptance_length, 2)
            fields["acceptance_rate"] = round(total.acceptance_rate, 3)
        if self._error is not None:
            fields["error"] = self._error.body["error"]["message"]
        level = logging.INFO if self._error is None else logging.ERROR
        log.log(level, "request", extra={"fields": fields})


def speculative_decoding(stats: SpeculationStats) -> dict[str, Any]:
    """The statistics of a request under vLLM's names.

    Entry i of the histogram is the number of drafts of which exactly i tokens were accepted. vLLM has no
    ``reached_per_position``.
    """
    reached = [stats.drafts, *stats.accepted_per_position, 0]
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [here - further for here, further in pairwise(reached)],
        "reached_per_position": stats.reached_per_position,
        "num_spec_steps": stats.drafts,
        "num_draft_tokens": stats.draft_tokens,
        "num_accepted_draft_tokens": stats.accepted_tokens,
    }
