"""``Graph``: run a function whose tensors keep their addresses; on CUDA it is recorded and replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class NotRecordableError(RuntimeError):
    """Work that can't be recorded; the message is a clause that gives the reason."""


class Graph(ABC):
    """Runs a function that reads and writes tensors of fixed addresses, and returns such tensors.

    The function must launch the same work every time, and may be called any number of times.
    """

    @abstractmethod
    def run(self, function: Callable[[], T]) -> T:
        """Do the work of ``function`` once, and return its value.

        Raises:
            NotRecordableError: the function waits for the device or fails; a part of its work was done.
        """

    @abstractmethod
    def record(self, function: Callable[[], object]) -> None:
        """Replay ``function`` in the following runs. It was run once; nothing is done now.

        Raises:
            NotRecordableError: the function can't be recorded.
        """


class HostGraph(Graph):
    """Calls the function: on the CPU nothing is recorded, but shapes and addresses are the same."""

    def run(self, function: Callable[[], T]) -> T:
        return function()

    def record(self, function: Callable[[], object]) -> None:
        pass


class CudaGraph(Graph):
    """Runs the function on a side stream first, which initialises libraries, and replays a CUDA graph later.

    Args:
        device: the device of all tensors.
        pool: the memory pool of the graph. Graphs that share a pool must not run at the same time, and a
            replay overwrites the values of the others.
    """

    def __init__(self, device: torch.device, pool: Any):
        self._device, self._pool = device, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._value: Any = None
        self._stream = torch.cuda.Stream(device)

    def run(self, function: Callable[[], T]) -> T:
        if self._graph is not None:
            self._graph.replay()
            value: T = self._value
            return value
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        # A synchronisation is found before the recording begins, because an error inside of a recording
        # leaves the stream in an undefined state.
        try:
            with torch.cuda.stream(self._stream):
                torch.cuda.set_sync_debug_mode("error")
                return function()
        except NotRecordableError:
            raise
        except RuntimeError as error:
            raise NotRecordableError(
                f"it waits for the GPU or fails ({_first_line(error)})"
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)

    def record(self, function: Callable[[], object]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                self._value = function()
        except RuntimeError as error:
            raise NotRecordableError(f"CUDA can't record it ({_first_line(error)})") from error
        self._graph = graph


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
