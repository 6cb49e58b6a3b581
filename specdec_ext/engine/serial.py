"""``SerialEngine``: decodes the requests of models that can't join a batch, in the order of their arrival.

It decodes one request at a time, each in a call of :func:`specdec_ext.generate`. So it serves every
model that ``generate`` serves, and a request's text is that of its own call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from specdec_ext.decoding.preparation import checked_seed
from specdec_ext.defaults import MAX_ROWS
from specdec_ext.engine.checks import check_request, check_sizes, checked_ids, longest_text, setting
from specdec_ext.engine.handle import Burst, FinishReason, Handle, Times, TokenLogprobs
from specdec_ext.engine.load import EngineLoad, first_stats
from specdec_ext.engine.logprobs import logprobs_of
from specdec_ext.errors import EngineClosedError, EngineFullError
from specdec_ext.generation import custom_generate, generate
from specdec_ext.report import Decision
from specdec_ext.stats import SpeculationStats


@dataclass(eq=False)
class _Request:
    handle: Handle
    input_ids: Tensor  # [1, length]
    seed: int | None
    logprobs: int | None
    arguments: dict[str, Any]


class SerialEngine:
    """Decodes requests, one at a time and first come, first served, in a thread of its own.

    As a context manager, it ends with ``shutdown()``.

    Args:
        model: the target; see :func:`specdec_ext.generate`.
        drafter: what proposes tokens, as in ``generate``; a request may choose another one.
        speculation: as in ``generate``; a request may choose another value.
        tokenizer: the target's tokenizer; requests with ``stop_strings`` need it.
        max_rows: the most requests that may be decoded together, at least 1. This engine never decodes more
            than one.
        max_length: as in :class:`Engine`.
        max_tokens: the most tokens, prompt and new ones together, that all running requests may have; None
            for no limit besides ``max_length``.
        max_waiting: the most requests that may wait; None for no limit.
        prefix_tokens: as in :class:`Engine`. This engine keeps none.

    Raises:
        ValueError: for an argument that is not valid.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        drafter: Any = "auto",
        speculation: Any = "auto",
        tokenizer: Any = None,
        max_rows: int = MAX_ROWS,
        max_length: int | None = None,
        max_tokens: int | None = None,
        max_waiting: int | None = None,
        prefix_tokens: int = 0,
    ):
        check_sizes(max_rows=max_rows, max_length=max_length, max_tokens=max_tokens)
        check_sizes(least=0, max_waiting=max_waiting, prefix_tokens=prefix_tokens)
        custom_generate(drafter, speculation=speculation, tokenizer=tokenizer)  # it checks them
        self.model, self.tokenizer = model, tokenizer
        self.max_rows, self.max_tokens, self.max_waiting = max_rows, max_tokens, max_waiting
        self._defaults = {"drafter": drafter, "speculation": speculation}
        self.max_length = max_length or longest_text(model)
        if max_tokens is not None:
            self.max_length = min(self.max_length, max_tokens)
        self._stats = first_stats(drafter, speculation)
        self._changed = Condition()
        self._waiting: deque[_Request] = deque()
        self._running: _Request | None = None
        self._is_closed = False
        self._thread = Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        input_ids: Sequence[int] | Tensor,
        *,
        seed: int | None = None,
        logprobs: int | None = None,
        **kwargs: Any,
    ) -> Handle:
        """Accept a request; it is decoded when those before it have ended.

        Args:
            input_ids: the prompt, as a list of ids or as ``[1, length]`` ids.
            seed: seed of the sampling noise; by default, it is drawn from torch's global generator.
            logprobs: the number of most probable tokens to return with the log probability of each emitted
                token; 0 for that of the emitted token alone. They are computed when the text is complete, so
                all bursts of such a request arrive at its end.
            **kwargs: the arguments of :func:`specdec_ext.generate` for one row. ``max_new_tokens`` is
                required. ``drafter`` and ``speculation`` replace those of the engine.

        Raises:
            ValueError: for a prompt, a length or a keyword that is not valid; the message names it. A value
                that only transformers refuses fails the request instead.
            EngineFullError: ``max_waiting`` requests wait.
            EngineClosedError: :meth:`shutdown` was called.
        """
        ids = checked_ids(self.model, input_ids)
        if seed is not None:
            checked_seed(seed)
        arguments = {**self._defaults, **kwargs}
        check_request(self.model, logprobs, arguments)
        hook = {name: arguments[name] for name in ("verification", "graphs") if name in arguments}
        custom_generate(
            arguments["drafter"],
            speculation=arguments["speculation"],
            tokenizer=self.tokenizer,
            stop_strings=setting(self.model, "stop_strings", arguments),
            **hook,
        )
        self._check_length(ids.shape[1], setting(self.model, "max_new_tokens", kwargs))
        handle = Handle(ids.shape[1], Times(time.perf_counter()))
        with self._changed:
            if self._is_closed:
                raise EngineClosedError("the engine was shut down; start another one")
            self._drop_cancelled()
            ahead = len(self._waiting) + (self._running is not None)
            if self.max_waiting is not None and ahead > self.max_waiting:
                raise EngineFullError(
                    f"{len(self._waiting)} requests wait, the most that may (max_waiting="
                    f"{self.max_waiting}); submit this one again later"
                )
            self._waiting.append(_Request(handle, ids, seed, logprobs, arguments))
            self._changed.notify_all()
        return handle

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted: before :meth:`shutdown`, and while the engine's thread lives."""
        return not self._is_closed and self._thread.is_alive()

    @property
    def load(self) -> EngineLoad:
        """What the engine is doing now."""
        with self._changed:
            self._drop_cancelled()
            running = self._running
            cached = 0
            if running is not None:
                cached = running.handle.prompt_tokens + len(running.handle.tokens)
            return EngineLoad(
                int(running is not None), len(self._waiting), cached, self.max_tokens, max_rows=1
            )

    @property
    def decision(self) -> Decision | None:
        """What the controller chose last in the last request that had one; None before that."""
        report = self._stats.report
        return None if report is None else report.decision

    def stats(self) -> SpeculationStats:
        """The statistics of all requests that have ended, added up."""
        with self._changed:
            total = SpeculationStats()
            total.add(self._stats)
            return total

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, and wait until the engine has ended.

        Args:
            drain: finish the requests that were accepted; with False they are cancelled.
            timeout: the longest time to wait, in seconds; None waits without a limit.

        Raises:
            TimeoutError: the engine has not ended in time. It goes on until its requests have ended.
        """
        with self._changed:
            self._is_closed = True
            if not drain:
                for request in self._waiting:
                    request.handle.cancel()
                if self._running is not None:
                    self._running.handle.cancel()
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine has not ended within {timeout} seconds")

    def __enter__(self) -> SerialEngine:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        self.shutdown(drain=error_type is None)

    def _check_length(self, prompt: int, new: int) -> None:
        if prompt + new > self.max_length:
            raise ValueError(
                f"the prompt has {prompt} tokens, and with max_new_tokens={new} the text may have "
                f"{prompt + new}; the engine and the model admit {self.max_length}"
            )

    # --- the engine's thread

    def _drop_cancelled(self) -> None:
        kept: deque[_Request] = deque()
        for request in self._waiting:
            if request.handle.is_cancelled:
                request.handle.finish("cancelled")
            else:
                kept.append(request)
        self._waiting = kept

    def _next(self) -> _Request | None:
        """Wait for a request; None if there will be none."""
        with self._changed:
            self._running = None
            while True:
                self._drop_cancelled()
                if self._waiting:
                    self._running = self._waiting.popleft()
                    return self._running
                if self._is_closed:
                    return None
                self._changed.wait()

    def _run(self) -> None:
        while (request := self._next()) is not None:
            handle = request.handle
            handle.times.started = time.perf_counter()
            reason: FinishReason = "error"
            failure: BaseException | None = None
            try:
                reason = self._decode(request)
            except BaseException as error:  # of this request only
                failure = error
            with self._changed:
                self._count(handle.stats)
            handle.finish(reason, failure)

    def _count(self, stats: SpeculationStats) -> None:
        mine = self._stats
        named = {"drafter": mine.drafter, "policy": mine.policy, "report": mine.report}
        mine.add(stats)
        if stats.policy == "none":  # a request without drafts says nothing about the engine's
            vars(mine).update(named)

    def _decode(self, request: _Request) -> FinishReason:
        handle, arguments = request.handle, dict(request.arguments)
        wants_logprobs = request.logprobs is not None
        criteria = [*(arguments.pop("stopping_criteria", None) or []), _Cancelled(handle)]
        stream = _Stream(handle, keeps=wants_logprobs)
        output: Any = generate(
            self.model,
            request.input_ids,
            attention_mask=torch.ones_like(
                request.input_ids
            ),  # ids of paddings are ordinary tokens
            seed=request.seed,
            streamer=stream,
            tokenizer=self.tokenizer,
            stopping_criteria=StoppingCriteriaList(criteria),
            return_dict_in_generate=True,
            output_logits=wants_logprobs,
            **arguments,
        )
        handle.stats = output.speculation_stats
        if request.logprobs is not None:
            logits = torch.cat(output.logits)  # ``[1, vocab]`` for each token
            stream.emit_kept(logprobs_of(logits, stream.tokens, request.logprobs))
        return self._reason(request, stream.tokens)

    def _reason(self, request: _Request, tokens: list[int]) -> FinishReason:
        ends = setting(self.model, "eos_token_id", request.arguments)
        if tokens[-1] in (ends if isinstance(ends, (list, tuple)) else [ends]):
            return "stop"
        if len(tokens) >= setting(self.model, "max_new_tokens", request.arguments):
            return "length"
        return "cancelled" if request.handle.is_cancelled else "stop"


class _Cancelled(StoppingCriteria):
    """Ends a request after the token at which it was cancelled."""

    def __init__(self, handle: Handle):
        self._handle = handle

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        cancelled = self._handle.is_cancelled
        return torch.full((len(input_ids),), cancelled, device=input_ids.device)


class _Stream:
    """The streamer that turns the steps of a call into bursts.

    Args:
        handle: the request.
        keeps: collect the bursts until :meth:`emit_kept`.
    """

    def __init__(self, handle: Handle, keeps: bool):
        self._handle, self._keeps = handle, keeps
        self._step = Burst([], [])
        self._kept: list[Burst] = []
        self.tokens: list[int] = []

    def put(self, prompt: Tensor) -> None:
        """The prompt, which is not emitted."""

    def put_drafted(self, tokens: Tensor, drafted: Tensor) -> None:
        self._step.tokens.append(int(tokens[0]))
        self._step.drafted.append(bool(drafted[0]))

    def end_step(self) -> None:
        self.tokens += self._step.tokens
        if self._keeps:
            self._kept.append(self._step)
        else:
            self._handle.emit(self._step)
        self._step = Burst([], [])

    def end(self) -> None:
        """Every step has ended already."""

    def emit_kept(self, logprobs: list[TokenLogprobs]) -> None:
        start = 0
        for burst in self._kept:
            end = start + len(burst.tokens)
            self._handle.emit(Burst(burst.tokens, burst.drafted, logprobs[start:end]))
            start = end
