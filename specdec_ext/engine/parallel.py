"""``ParallelEngine``: the engine of a tensor-parallel model, the same steps in every process.

Rank 0 accepts requests. Before each step it tells the other ranks what has arrived and what was cancelled
since the last one, so that all of them decode the same batch. The model's own collectives then meet, and
every rank computes every text; the other ranks throw theirs away.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from specdec_ext.engine.engine import Engine
from specdec_ext.engine.handle import Handle
from specdec_ext.engine.load import EngineLoad
from specdec_ext.engine.request import Request

# The other ranks wait for a message as long as nothing is asked of the server.
_LONGEST_WAIT = timedelta(days=365)


@dataclass
class _Message:
    """What rank 0 tells the other ranks before a step.

    Attributes:
        arrived: pickled arguments of :meth:`Engine.submit`, in their order.
        cancelled: numbers of requests that were cancelled.
        goes_on: False if there will be no further step.
    """

    arrived: list[bytes] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    goes_on: bool = True


@dataclass(eq=False)
class _SharedHandle(Handle):
    """A request that several ranks decode: it is cancelled in all of them before the same step.

    Attributes:
        number: the number of the request, the same on all ranks.
        sent: the pickled arguments of the request.
        on_cancel: called by :meth:`cancel`.
    """

    number: int = -1
    sent: bytes = b""
    on_cancel: Callable[[_SharedHandle], None] | None = None

    def cancel(self) -> None:
        if self.on_cancel is not None:
            self.on_cancel(self)

    def cancel_here(self) -> None:
        """Cancel the request on this rank."""
        super().cancel()


class ParallelEngine(Engine):
    """An :class:`Engine` for a model that ``tp_plan`` has spread over the processes of ``torchrun``.

    All processes make one with the same arguments. Rank 0 submits requests and shuts the engine down; the
    others call :meth:`follow`, which returns after the shutdown. The text of a request is that of a single
    process up to the order in which the parts of sums are added.

    Attributes:
        rank: the number of this process.
        failure: the exception with which the engine has ended; None if there was none.

    Args:
        model: a tensor-parallel model.
        on_failure: called on rank 0 if the engine has ended with an exception. The ranks are not in step any
            more then, so the program should end; ``torchrun`` ends the others.
        **options: the other arguments of :class:`Engine`.

    Raises:
        ValueError: torch's processes are not set up.
        CantJoinError: as for :class:`Engine`.
    """

    _handle_type = _SharedHandle

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        on_failure: Callable[[], object] | None = None,
        **options: Any,
    ):
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ValueError(
                "the processes of a tensor-parallel model are not set up; start them with torchrun, and load "
                "the model with tp_plan='auto'"
            )
        self.rank = distributed.get_rank()
        # A group of its own: its timeout is long, and gloo takes messages from the CPU beside any device.
        self._group = distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
        self._on_failure = on_failure
        self.failure: BaseException | None = None
        self._arriving: deque[Request] = deque()
        self._to_cancel: list[_SharedHandle] = []
        self._handles: dict[int, _SharedHandle] = {}
        self._count = 0
        super().__init__(model, **options)
        if self.rank == 0:  # from now on: the others wait for its messages
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
        """Accept a request, as :meth:`Engine.submit` does; on rank 0 only.

        Raises:
            ValueError: as there, or for an argument that can't be sent to other processes.
            RuntimeError: on another rank.
        """
        if self.rank:
            raise RuntimeError(f"rank {self.rank} takes no requests; submit them on rank 0")
        if seed is None:
            # Drawn here: the ranks would have to meet to agree on one.
            seed = int(torch.randint(2**62, (), device="cpu"))
        if isinstance(input_ids, Tensor):
            input_ids = input_ids.tolist()
        try:
            sent = pickle.dumps((input_ids, seed, logprobs, kwargs))
        except Exception as error:  # pickle raises what it likes
            raise ValueError(
                f"the request can't be sent to the other processes of the model: {error}; leave out the "
                "argument that can't be pickled"
            ) from error
        request = self._prepared(input_ids, seed, logprobs, kwargs)
        handle: Any = request.handle
        handle.sent, handle.on_cancel = sent, self._cancel_soon
        return self._submit(request, self._arriving)

    def follow(self) -> None:
        """Decode what rank 0 submits, until it shuts the engine down; on the other ranks."""
        self._run()

    @property
    def load(self) -> EngineLoad:
        """What the engine is doing now."""
        load = super().load
        return replace(load, waiting=load.waiting + len(self._arriving))

    def _cancel_soon(self, handle: _SharedHandle) -> None:
        with self._changed:
            self._to_cancel.append(handle)
            self._changed.notify_all()

    # --- the engine's thread

    def _run(self) -> None:
        try:
            super()._run()
        except BaseException as error:
            self.failure = error
            self._fail([*self._arriving], error)
            if self._on_failure is not None:
                self._on_failure()
            raise

    def _wait(self) -> bool:
        """Wait for work, and bring all ranks to the same state."""
        if self.rank == 0:
            message = self._collected()
            self._broadcast(message)
        else:
            message = self._broadcast(None)
            # In a thread of its own, because on rank 0 this is outside of the engine's transaction, too.
            with ThreadPoolExecutor(1) as thread:
                for sent in message.arrived:
                    ids, seed, logprobs, kwargs = pickle.loads(sent)
                    arguments = (ids, seed, logprobs, kwargs)
                    self._add(thread.submit(self._prepared, *arguments).result())
        for number in message.cancelled:
            if number in self._handles:
                self._handles[number].cancel_here()
        return message.goes_on

    def _collected(self) -> _Message:
        """Wait until there is something to do, and say what all ranks must know before they do it."""
        message = _Message()
        with self._changed:
            while not (
                self._arriving or self._waiting or self._reading or self._loop.batch.requests
            ):
                if not self._accepts:
                    message.goes_on = False
                    return message
                self._changed.wait()
            while self._arriving:
                request = self._arriving.popleft()
                handle: Any = request.handle
                message.arrived.append(handle.sent)
                self._add(request)
            if not self._drains:
                message.cancelled = [*self._handles]
            message.cancelled += [each.number for each in self._to_cancel]
            self._to_cancel.clear()
        return message

    def _add(self, request: Request) -> None:
        """Give a request its number, and let it wait for a row."""
        handle: Any = request.handle
        handle.number, self._count = self._count, self._count + 1
        self._handles = {n: each for n, each in self._handles.items() if not each.finish_reason}
        self._handles[handle.number] = handle
        self._waiting.append(request)

    def _broadcast(self, message: _Message | None) -> _Message:
        objects = [message]
        distributed.broadcast_object_list(objects, src=0, group=self._group)
        (told,) = objects
        assert told is not None
        return told

    def _attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Run something of the whole batch. If it fails, the ranks are not in step any more."""
        work(*args)
