"""``Engine``: decodes requests that arrive and leave at any time, in one batch (continuous batching)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.decoding.call import Call
from specdec_ext.decoding.preparation import BLOCK_SLOTS, PreparedCall, decode_through, prepare
from specdec_ext.defaults import MAX_ROWS, PREFIX_TOKENS
from specdec_ext.drafters.choice import DrafterChoice
from specdec_ext.engine.batch import RequestBatch
from specdec_ext.engine.checks import check_request, check_sizes, checked_ids, longest_text
from specdec_ext.engine.handle import Handle, Times
from specdec_ext.engine.load import EngineLoad, first_stats
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.engine.prefixes import PrefixCache
from specdec_ext.engine.request import BurstStream, LogprobRecorder, Request
from specdec_ext.errors import CantJoinError, EngineClosedError, EngineFullError
from specdec_ext.generation import policy_of
from specdec_ext.models import make_target
from specdec_ext.models.patching.changes import transactional
from specdec_ext.models.slots import SlotTarget
from specdec_ext.report import Decision
from specdec_ext.schedule.settings import resolve_speculation
from specdec_ext.stats import SpeculationStats

# Number of prompt tokens that a step reads at most. Longer prompts are read in several steps, always in parts
# of this many tokens, so that the text does not depend on what else is running.
PREFILL_TOKENS = 256
# So many tokens are a long part. The drafts of the step after it are short, because running texts have waited
# already: the longest times per token are in these steps.
LONG_PART = PREFILL_TOKENS // 2


class Engine:
    """Decodes many requests in one batch, with speculative decoding; they join and leave between two steps.

    The text of a request is the one that :func:`specdec_ext.generate` returns for it alone, whatever else is
    running. All requests share the forward passes of the target, the drafts and, where ops alone can verify
    them, the verification. One thread does all the work; it starts with the first request. From then on the
    model must not change.

    Use it as a context manager, or call :meth:`shutdown` at the end.

    Args:
        model: a decoder-only model whose batches can be speculated on (``supports(model).batch``) and whose
            cache is rolled back by slots.
        drafter: as in :func:`specdec_ext.generate`; it must be ``joinable``.
        speculation: as in :func:`specdec_ext.generate`.
        tokenizer: the model's tokenizer, for ``stop_strings``.
        max_rows: the most requests that run at a time.
        max_length: the most tokens of a request, its prompt included; None for as many as the model has
            positions, or 8192 if its config does not say.
        max_tokens: the most tokens that the cache may hold. Every row has the same room, so a request may
            have ``max_tokens // max_rows``. None for ``max_rows * max_length``.
        max_waiting: the most requests that wait for a row; None for any number.
        prefix_tokens: the most tokens of prompts whose keys and values are kept for later requests with
            prompts that begin with the same tokens, in parts of ``PREFILL_TOKENS``; 0 keeps none.
        graphs: as in :func:`specdec_ext.generate`.

    Raises:
        CantJoinError: requests of the model or with the drafter can't join a batch.
        ValueError: for an argument that is not valid.
    """

    _handle_type: type[Handle] = Handle

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
        prefix_tokens: int = PREFIX_TOKENS,
        graphs: bool | str = "auto",
    ):
        check_sizes(max_rows=max_rows, max_length=max_length, max_tokens=max_tokens)
        check_sizes(least=0, max_waiting=max_waiting, prefix_tokens=prefix_tokens)
        self.model, self.tokenizer, self.max_rows = model, tokenizer, max_rows
        self.max_length = max_length or longest_text(model)
        if max_tokens is not None:
            self.max_length = min(self.max_length, max_tokens // max_rows)
            if self.max_length < 2:
                raise ValueError(
                    f"max_tokens={max_tokens} leaves {self.max_length} tokens to each row of "
                    f"max_rows={max_rows}; a request needs at least 2"
                )
        self.max_tokens = max_rows * self.max_length
        self.max_waiting, self._graphs = max_waiting, graphs
        self._speculation = speculation
        self._settings = resolve_speculation(speculation)
        choice = DrafterChoice(drafter, tokenizer)
        self.drafter = choice.drafter(model, model.generation_config)
        if self.drafter is not None and not self.drafter.joinable:
            raise CantJoinError(
                f"{type(self.drafter).__name__} can't serve requests that join a running batch; use another "
                "drafter, such as 'ngram', 'suffix' or a draft head, or call specdec_ext.generate"
            )
        self._stats = first_stats(self.drafter, speculation)
        self._prefixes = PrefixCache(PREFILL_TOKENS, prefix_tokens)
        self._begin()
        self._changed = Condition()
        self._waiting: deque[Request] = deque()
        self._reading: deque[Request] = deque()
        self._accepts, self._drains = True, True
        self._thread: Thread | None = None

    def _begin(self) -> None:
        """Make an empty batch."""
        slots = self.max_length + BLOCK_SLOTS
        target = make_target(self.model, slots, graphs=self._graphs)
        support = target.support
        if not isinstance(target, SlotTarget) or not support.batch or support.rollback != "compact":
            why = "; ".join(support.reasons) or f"its rollback is {support.rollback!r}"
            raise CantJoinError(
                f"requests of {type(self.model).__name__} can't join a batch: {why}. Call "
                "specdec_ext.generate for one request after another"
            )
        batch = RequestBatch(target, self.max_rows, self.max_length, self._stats)
        policy = policy_of(self._settings, self.drafter, self.model, temperature=None)
        self._loop = EngineLoop(target, self.drafter, batch, policy)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.shutdown(drain=kind is None)

    def submit(
        self,
        input_ids: Sequence[int] | Tensor,
        *,
        seed: int | None = None,
        logprobs: int | None = None,
        **kwargs: Any,
    ) -> Handle:
        """Accept a request. It begins as soon as there is a free row.

        Args:
            input_ids: the prompt, a list of ids or ``[1, length]``.
            seed: seed of the sampling noise; the text of a seed is that of ``generate(seed=[seed])``.
            logprobs: number of most probable tokens to return with each token; 0 returns the log probability
                of the emitted token alone, None returns nothing.
            **kwargs: the other arguments of ``model.generate`` for one row.

        Raises:
            ValueError: for an argument that can't be honoured; nothing has run.
            EngineFullError: ``max_waiting`` requests wait.
            EngineClosedError: after :meth:`shutdown`.
        """
        return self._submit(self._prepared(input_ids, seed, logprobs, kwargs), self._waiting)

    def _submit(self, request: Request, queue: deque[Request]) -> Handle:
        """Add a request to a queue, and wake the thread."""
        with self._changed:
            if not self._accepts:
                raise EngineClosedError("the engine was shut down and accepts no requests")
            waiting = self.load.waiting - (self.max_rows - len(self._running))
            if self.max_waiting is not None and waiting >= self.max_waiting:
                raise EngineFullError(
                    f"{waiting} requests wait for a row, the most that this engine admits; try again later"
                )
            queue.append(request)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="specdec-engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return request.handle

    def _prepared(
        self, input_ids: Sequence[int] | Tensor, seed: int | None, logprobs: int | None, kwargs: Any
    ) -> Request:
        ids = checked_ids(self.model, input_ids)
        kwargs = dict(kwargs)
        check_request(self.model, logprobs, kwargs)
        drafts = self._takes_drafts(kwargs)
        calls: list[PreparedCall] = []

        def decode(call: PreparedCall) -> Tensor:
            calls.append(call)
            return call.input_ids

        def hook(stop_strings: Any) -> Any:
            seeds = None if seed is None else [seed]
            return prepare(decode, seed=seeds, tokenizer=self.tokenizer, stop_strings=stop_strings)

        options = {"attention_mask": torch.ones_like(ids), **kwargs}
        options["prefill_chunk_size"] = PREFILL_TOKENS
        decode_through(self.model, ids, options, hook)
        (call,) = calls
        if len(call.input_ids) != 1:
            raise ValueError("a request of an engine has one row; submit it once for each sequence")
        if call.stop.max_length > self.max_length:
            raise ValueError(
                f"the request may have {call.stop.max_length} tokens with its prompt of "
                f"{call.input_ids.shape[1]}, and this engine admits {self.max_length}; pass a smaller "
                "max_new_tokens or a shorter prompt"
            )
        return self._request(call, logprobs, drafts)

    def _takes_drafts(self, kwargs: dict[str, Any]) -> bool:
        """Remove what a request says about drafting; returns whether it takes drafts.

        Raises:
            ValueError: it asks for something else than the other requests.
        """
        given = kwargs.pop("speculation", self._speculation)
        drafter = kwargs.pop("drafter", self.drafter)
        plain = drafter is None or drafter == "none"
        asked = {
            "drafter": plain or drafter is self.drafter,
            "speculation": given == self._speculation,
        }
        asked |= {
            "verification": kwargs.pop("verification", "match") == "match",
            "graphs": kwargs.pop("graphs", self._graphs) == self._graphs,
        }
        for name, agrees in asked.items():
            if not agrees:
                raise ValueError(
                    f"{name} of a request differs from that of the engine, which decodes all requests "
                    "together; leave it out, or pass drafter=None for a request without drafts"
                )
        return not plain

    def _request(self, prepared: PreparedCall, logprobs: int | None, drafts: bool) -> Request:
        recorder: Any = LogprobRecorder(logprobs)
        slots = self.max_length + BLOCK_SLOTS
        target = prepared.target(prepared.recorder(), False, slots, shares_passes=True)
        if not isinstance(target, SlotTarget) or not target.support.batch:
            raise CantJoinError(
                f"the request can't join a batch: {'; '.join(target.support.reasons)}; call "
                "specdec_ext.generate for it"
            )
        target.record_hidden_states(self._loop.target.recorded_layers)
        call = Call.of(prepared, target, recorder, self.drafter if drafts else None)
        times = Times(time.perf_counter())
        handle = self._handle_type(prepared.input_ids.shape[1], times, call.stats)
        stream: Any = BurstStream(handle, recorder)
        return Request(replace(call, stream=stream), target, handle, self._prefixes, drafts)

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted: before :meth:`shutdown`, and while the engine's thread lives."""
        return self._accepts

    @property
    def load(self) -> EngineLoad:
        """What the engine is doing now."""
        running = self._running
        cached = sum(len(each.handle.tokens) + each.handle.prompt_tokens for each in running)
        return EngineLoad(len(running), len(self._waiting), cached, self.max_tokens, self.max_rows)

    @property
    def decision(self) -> Decision | None:
        """What the controller chose last, and from what; None before that, or with nothing to choose."""
        policy = self._loop.policy
        return None if policy is None else policy.decision()

    def stats(self) -> SpeculationStats:
        """The statistics of all requests so far."""
        return self._stats

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop accepting requests, and end the thread.

        Args:
            drain: finish the accepted requests first; False cancels them.
            timeout: the longest time to wait, in seconds; None waits without a limit.

        Raises:
            TimeoutError: the engine has not ended in time. It goes on until its requests have ended.
        """
        with self._changed:
            self._accepts = False
            self._drains = self._drains and drain
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine has not ended within {timeout} seconds")

    # --- the engine's thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            with self._changed:
                self._accepts = False
            self._fail([*self._waiting, *self._reading, *self._active], error)
            raise

    @transactional
    def _serve(self) -> None:
        with torch.no_grad():
            while self._wait():
                self._remove_ended()
                self._admit()
                self._read_prompts()
                if self._active:
                    self._attempt(self._loop.step)
        self._end()

    def _end(self) -> None:
        """Give back what recorded passes have borrowed."""
        if self._loop.target.runner.graphs is not None:
            self._loop.target.runner.graphs.finish()

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        for request in requests:
            request.error = error
            request.finish()

    def _wait(self) -> bool:
        """Wait for work; returns False when the engine has been shut down and everything has ended."""
        with self._changed:
            while not (self._waiting or self._reading or self._loop.batch.requests):
                if not self._accepts:
                    return False
                self._changed.wait()
            if not self._drains:
                for request in (*self._waiting, *self._reading, *self._active):
                    request.handle.cancel()
        return True

    @property
    def _running(self) -> set[Request]:
        """The requests that have begun. One that joins the batch may be in both places for a moment."""
        return {*self._reading, *self._active}

    @property
    def _active(self) -> list[Request]:
        return list(self._loop.batch.requests.values())

    def _remove_rows(self) -> None:
        """Let requests that have ended leave the batch."""
        for place, request in [*self._loop.batch.requests.items()]:
            if request.finish_reason is not None:
                request.finish()
                self._loop.batch.leave(place)
        self._loop.follow()

    def _remove_ended(self) -> None:
        self._remove_rows()
        for queue in (self._waiting, self._reading):
            for request in [*queue]:
                if request.finish_reason is not None:
                    request.finish()
                    queue.remove(request)

    def _admit(self) -> None:
        """Begin waiting requests, in their order, as long as there are rows."""
        while self._waiting and len(self._reading) + len(self._active) < self.max_rows:
            self._reading.append(self._waiting.popleft())

    @transactional
    def _read_prompts(self) -> None:
        """Read prompts, PREFILL_TOKENS at most; requests whose prompts are complete join the batch."""
        read = 0
        while self._reading:
            request = self._reading[0]
            try:
                if not request.has_begun:
                    request.begin()
                if read + request.next_pass > PREFILL_TOKENS:
                    break
                read += request.next_pass
                output = request.prefill()
            except Exception as error:
                request.error = error
            else:
                if output is None:
                    continue
            if request.finish_reason is None:
                self._attempt(self._loop.settle)
                self._remove_rows()
                self._attempt(self._loop.join, request, output)
            else:
                request.finish()
            self._reading.popleft()
        if read >= LONG_PART:
            self._loop.hurry()

    def _attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Run something of the whole batch. An error that is not of one request ends all requests in it."""
        try:
            work(*args)
        except Exception as error:
            newcomers = [each for each in args if isinstance(each, Request)]
            self._fail([*{*self._active, *newcomers}], error)
            self._end()
            self._begin()
