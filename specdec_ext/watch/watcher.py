"""``Watcher``: looks at the metrics of a server, again and again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from specdec_ext.display.text import one_line
from specdec_ext.preflight.address import Address
from specdec_ext.preflight.extras import require
from specdec_ext.serve import names
from specdec_ext.watch.history import Growth, History
from specdec_ext.watch.judge import Reference, Verdict, acceptance, judge
from specdec_ext.watch.limits import LIMITS, Limits
from specdec_ext.watch.report import Report
from specdec_ext.watch.snapshot import REFERENCE, Snapshot, read

if TYPE_CHECKING:
    from specdec_ext.rollout.lock import PairLock

MAX_BYTES = 16 << 20  # of a page of metrics


class Watcher:
    """Watches a server; a context manager.

    Args:
        url: its address, such as ``http://127.0.0.1:8000``. A path that ends with ``/metrics`` is that of the
            page; another one, such as ``/v1``, is replaced by ``/metrics``.
        model: name of the model; None for the only one that it serves.
        reference: the acceptance that is expected; None for the one that the server exports, if it was
            started with a lock.
        lock: the target and draft that the server must have; None does not compare them.
        limits: when it is not well; their window is the time over which it is judged.
        api_key: sent with every request.
        timeout: seconds that an answer may take.
        clock, sleep: return seconds, and wait for some.

    Raises:
        ValueError: if ``url`` is no address.
        ImportError: if httpx2 or prometheus_client is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        reference: Reference | None = None,
        lock: PairLock | None = None,
        limits: Limits = LIMITS,
        api_key: str | None = None,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        require("prometheus_client", "specdec watch")
        http = require("httpx2", "specdec watch")
        address = Address.parse(url, "URL")
        path = address.path if address.path.endswith("/metrics") else "/metrics"
        self.url, self._page = address.name, f"{address.origin}{path}"
        self._pair_page = self._page.removesuffix("/metrics") + "/pair"
        self._place = f"{address.name}{path}"  # for messages: the other one may have a password
        self._model, self._reference, self._lock, self._limits = model, reference, lock, limits
        self._clock, self._sleep = clock, sleep
        self._unreachable = (http.HTTPError, http.StreamError, OSError)
        self._invalid, self._timeout = http.InvalidURL, timeout
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = http.Client(headers=headers, timeout=timeout)
        self._history = History(limits.window_seconds)
        self._last: Snapshot | None = None

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def looks(self, interval: float, seconds: float | None = None) -> Iterator[Report]:
        """Look again and again.

        Args:
            interval: seconds between two looks.
            seconds: time after which the last one is made; None for never.

        Raises:
            ValueError: as :meth:`look`.
        """
        began = self._clock()
        while True:
            left = math.inf if seconds is None else began + seconds - self._clock()
            yield self.look()
            if left <= 0:
                return
            self._sleep(min(interval, left))

    def look(self) -> Report:
        """Fetch the metrics, and judge what was counted in the window; nothing, at the first look.

        Raises:
            ValueError: if the first answer that comes is not the page of metrics of such a server.
        """
        snapshot = self._fetched()
        if isinstance(snapshot, Report):
            return snapshot
        self._history.add(snapshot)
        return self._judged(snapshot, self._history.growth, self._history.recent)

    def look_at_all(self) -> Report:
        """Fetch the metrics, and judge all that was counted since the server began.

        Raises:
            ValueError: as :meth:`look`.
        """
        snapshot = self._fetched()
        if isinstance(snapshot, Report):
            return snapshot
        return self._judged(snapshot, Growth.between(None, snapshot), None)

    def _fetched(self) -> Snapshot | Report:
        """The metrics now; a report if there are none, though there may have been before."""
        try:
            page = self._answer()
        except self._invalid as error:
            raise ValueError(f"{self._place}: {one_line(str(error))}") from error
        except self._unreachable as error:
            return self._failed(f"{type(error).__name__} {error}")
        try:
            self._last = read(page, self._clock(), self._model)
        except ValueError as error:
            if self._last is None:
                raise ValueError(f"{self._place}: {error}") from error
            return self._failed(str(error))
        return self._last

    def _answer(self) -> str:
        """The page of metrics.

        Raises:
            ValueError: if there is none at this address, and never was.
        """
        status, raw = self._get(self._page)
        if status != 200:
            told = f"status {status}"
            if self._last is None and status < 500:
                raise ValueError(f"{self._place}: {told}; expected a page of metrics")
            raise ConnectionError(told)
        return raw.decode("utf-8", "replace")

    def _get(self, page: str) -> tuple[int, bytes]:
        """The status and the body of the answer for a page."""
        raw, began = b"", time.monotonic()
        with self._http.stream("GET", page) as answer:
            for part in answer.iter_bytes():
                raw += part
                if len(raw) > MAX_BYTES:
                    raise ConnectionError(f"the page is longer than {MAX_BYTES} bytes")
                if time.monotonic() - began > self._timeout:
                    raise ConnectionError(f"no complete page within {self._timeout:g} seconds")
        return answer.status_code, raw

    def _compared_pair(self, lock: PairLock) -> Verdict:
        """Whether the server has the locked pair; asked at each look, because it may be started again."""
        from specdec_ext.watch.pair import compare_pair, unverified  # they take seconds to import

        try:
            return compare_pair(lock, *self._get(self._pair_page))
        except self._unreachable as error:
            told = f"{type(error).__name__} {error}; the first answer takes as long as reading all weights"
            return unverified(told)

    def _failed(self, reason: str) -> Report:
        verdict = Verdict("server", "critical", f"no metrics: {one_line(reason)[:200]}")
        model = self._last.model if self._last else ""
        return Report(self.url, [verdict], model, restarts=self._history.restarts)

    def _judged(self, snapshot: Snapshot, growth: Growth | None, recent: Growth | None) -> Report:
        gauges = dict(snapshot.gauges)
        load = [
            f"{gauges[name]:.0f} {what}"
            for what, name in (("running", names.RUNNING), ("waiting", names.WAITING))
            if name in gauges
        ]
        verdicts = [Verdict("server", "well", ", ".join(["answers", *load]))]
        if self._lock is not None:
            verdicts.append(self._compared_pair(self._lock))
        positions = []
        if growth is not None:
            positions = acceptance(growth, self._reference or _exported(snapshot), self._limits)
            verdicts += judge(growth, positions, self._limits)
        return Report(
            self.url,
            verdicts,
            snapshot.model,
            growth,
            recent,
            gauges,
            positions,
            self._history.restarts,
        )


def _exported(snapshot: Snapshot) -> Reference | None:
    """The reference that a server with a lock exports."""
    accepted, reached = (snapshot.positions.get(name, ()) for name in REFERENCE)
    return Reference(reached, accepted) if accepted and len(accepted) == len(reached) else None
