"""``Graph``: run a function whose tensors keep their addresses; on CUDA it is recorded and replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class NotRecordableError(RuntimeError):
    """A pass that can't be recorded; the message is a clause that gives the reason."""


class Graph(ABC):
    """Runs a function that reads and writes tensors of fixed addresses."""

    @abstractmethod
    def run(self, function: Callable[[], None]) -> None:
        """Run ``function``, which must launch the same work every time.

        Raises:
            NotRecordableError: the function does something that can't be recorded.
        """


class HostGraph(Graph):
    """Calls the function: on the CPU nothing is recorded, but shapes and addresses are the same."""

    def run(self, function: Callable[[], None]) -> None:
        function()


class CudaGraph(Graph):
    """Records the function as a CUDA graph at the first call and replays it from then on.

    Args:
        device: the device of all tensors.
        pool: the memory pool of the graph. Graphs that share a pool must not run at the same time, and a
            replay overwrites the outputs of the others.
    """

    def __init__(self, device: torch.device, pool: Any):
        self._device, self._pool = device, pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, function: Callable[[], None]) -> None:
        if self._graph is None:
            self._record(function)
        assert self._graph is not None
        self._graph.replay()

    def _record(self, function: Callable[[], None]) -> None:
        """Run the function once to initialise libraries and find synchronisations, then record it.

        A synchronisation is found before the recording begins, because an error inside of a recording
        leaves the stream in an undefined state.
        """
        stream, current = (
            torch.cuda.Stream(self._device),
            torch.cuda.current_stream(self._device),
        )
        stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(stream):
            try:
                torch.cuda.set_sync_debug_mode("error")
                function()
            except NotRecordableError:
                raise
            except RuntimeError as error:
                raise NotRecordableError(
                    f"the pass waits for the GPU or fails ({_first_line(error)})"
                ) from error
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                function()
        except RuntimeError as error:
            raise NotRecordableError(f"CUDA can't record it ({_first_line(error)})") from error
        self._graph = graph


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
