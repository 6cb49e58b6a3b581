"""``PlannedEngine``: an engine in the thread of a test, which decides what happens before each round."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

from specdec_ext.engine import Engine


class PlannedEngine(Engine):
    """Runs a plan: a generator that is resumed before every round, and may submit and cancel requests."""

    def run(self, plan: Iterator[object]) -> None:
        """Run until the plan and all of its requests have ended."""
        self._plan = plan
        self._run()
        self._accepts = False

    def submit(self, *args, **kwargs):
        self._thread = self._thread or Thread()  # never started: run decodes
        return super().submit(*args, **kwargs)

    def shutdown(self, *args, **kwargs) -> None:
        """:meth:`run` has ended the engine."""

    @property
    def loop(self):
        """The loop of the present batch."""
        return self._loop

    def _wait(self) -> bool:
        goes_on = True
        while goes_on:
            goes_on = next(self._plan, self) is not self
            if self._waiting or self._reading or self._loop.batch.requests:
                return True
        return False
